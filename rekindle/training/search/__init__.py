"""A search over hyper-parameters: what to try, which trials go on, and the pods that train them."""
