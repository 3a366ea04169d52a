"""Runs a stage's training in several processes: on this machine, or as a TrainJob on a Kubernetes cluster.

What other packages use:

- `task.run_task`: a stage as a Kubeflow task, here or on a cluster
- `launch.run_ranks`: a rank function, called in several processes, here or in the pods of a TrainJob
- `config`: `ClusterConfig`, and the stage that runs on a cluster (`current_stage`)
- `collector`: what removes the folders of old runs from the shared volume
- `kube`: the connection to a cluster and its retry policy; `reaper.delete_run`: removal of a run's jobs

In the processes of a job run `agent` (torchrun's launcher) and `rank`, which share the files of `job`. Behind
`launch`, `trainjob` submits or adopts a TrainJob (`manifest`), watches it and its log (`watch`), reports why it failed
(`failures`), and removes it when the step is asked to stop (`termination`).
"""
