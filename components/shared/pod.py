"""What a process does differently in a pod of a cluster.

A pod that mounts a volume may do with its files what their modes allow, and Argo starts tasks with umask 0, so that its
own containers can read what they leave: files would be 0666, folders 0777.
"""

import os

POD_VARIABLE = "KFP_POD_NAME"
"""Kubeflow Pipelines sets it in the pods of its tasks."""
_UMASK = 0o007


def keep_files_in_group() -> None:
    """Have what this process and its children write be for their user and group: other pods neither read nor change it.

    All pods of runs are in group 0, under whichever user a cluster runs them.
    """
    os.umask(_UMASK)


def in_task() -> bool:
    """Tell whether this process is a task of Kubeflow Pipelines in a pod."""
    return POD_VARIABLE in os.environ
