"""Megatron-Core as a stack: its models, optimizers and process-wide state in a job that changes size."""

from etc_agent.adapters.megatron.adapter import Megatron as Megatron

__all__ = ["Megatron"]
