"""Runs a stage's training in several processes: on this machine, or as a TrainJob on a Kubernetes cluster.

Stages call `task.run_task` and `launch.run_ranks`. `agent` (torchrun's launcher) and `rank` run in the processes of a
job, and share the files of `job`. For `launch`, `trainjob` submits or adopts a TrainJob (`manifest`), watches it and
its log (`watch`), reports why it failed (`failures`), and removes it when the step is asked to stop (`termination`).
"""
