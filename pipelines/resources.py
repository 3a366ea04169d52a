"""What each kind of task asks of the cluster: change GPUs, cores and memory here."""

from kfp import dsl


def light(task: dsl.PipelineTask) -> None:
    """Ask for what a task on problems and scores needs."""
    task.set_cpu_request("1").set_cpu_limit("2")
    task.set_memory_request("2G").set_memory_limit("4G")


def gpu(task: dsl.PipelineTask) -> None:
    """Ask for what a task that runs the model needs."""
    task.set_cpu_request("4").set_cpu_limit("16")
    task.set_memory_request("32G").set_memory_limit("128G")
    task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)
