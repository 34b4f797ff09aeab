"""One Kubernetes object a file: functions that return plain data, with the conditions that say how it ended.

What a pipeline is made of:
  step.step("prepare", cluster)                      a step module as an Argo template
  resource.apply("train", job, success=..., ...)     apply an object and wait for its SUCCESS or FAILURE
  pytorch_job.pytorch_job(name, train, cluster, ...) our training: a coordinator and Workers that come and go
  deployment, service, autoscaler, disruption_budget what serves a model

Training of other frameworks, on the training operator; a replica is kubeflow.Replica(cluster.pod("train"), args, 4):
  kubeflow.training_job("TFJob", name, {"Chief": ..., "Worker": ..., "PS": ..., "Evaluator": ...}, cluster)
  kubeflow.training_job("XGBoostJob", name, {"Master": ..., "Worker": ...}, cluster); also PaddleJob and JAXJob
  mpi_job.mpi_job(name, launcher, pod, 4, cluster)  v1 of the training operator; mpi_job_v2: the mpi-operator's
Without it:
  train_job.train_job(name, runtime, args, ...)      Kubeflow Trainer v2, on train_job.training_runtime(...)
  job.job(name, pod, args, cluster)                  one pod, retried; preemptions do not count
  search.search(name, pod, args, cluster, trials=50) many trials, each with retries of its own
Others:
  inference_service.inference_service(name, ...)     KServe: a canary, nothing running when idle
  volume.volume_claim(name, "200Gi")                 a volume shared by all nodes; cluster.cache puts datasets there

Everything takes its image, resources and nodes from settings.PodConfig; presets.yaml has nodes, GPUs and gangs by name.
"""
