"""The steps of a workload with several families: fit those without training steps, choose the best."""
