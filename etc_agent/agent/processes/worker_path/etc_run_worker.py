"""What torch calls at the end of ``import torch`` in the workers of etc-run, and in no other process.

torch calls every entry point of the group ``torch.backends`` that it finds on `sys.path`. The folder of this file has
one, and nothing else; the agent appends it to the PYTHONPATH of its workers (`etc_agent.agent.processes.torch_hook`).
"""


def install():
    """Give each repeated ``init_process_group`` of this worker keys of its own in the agent's store.

    A worker may run a Python that has no etc-run, or one that cannot run it. There ``import torch`` goes on, and
    repeated process groups behave as under torchrun.
    """
    try:
        from etc_agent.worker.process.group_numbers import install
    except Exception:
        return
    install()
