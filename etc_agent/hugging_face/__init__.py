"""Hugging Face's Trainer in a job that changes size."""

from __future__ import annotations

from etc_agent.hugging_face.trainer import ElasticTrainer

__all__ = ["ElasticTrainer"]
