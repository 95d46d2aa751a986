"""Hugging Face's Trainer in a job that changes size: data parallel, with its own callbacks, logs, evaluation and saves.

    from etc_agent.hugging_face import ElasticTrainer       # before TrainingArguments are made

    ElasticTrainer(model=model, args=args, train_dataset=data, ..., global_batch=64).train()

Trainer keeps rank and size from the moment when TrainingArguments are made. So until `train`, this process is a world
of its own for accelerate, and the trainer is set up as it is in a script for one process. `train` opens a session, in
which each generation gets a copy of the model, an optimizer and a schedule from the trainer's own methods, and a fresh
Accelerator. The loop over the steps is the session's; what happens in a step is the trainer's.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import TrainOutput

from etc_agent.errors import EtcError
from etc_agent.hugging_face.twins import meta_twin
from etc_agent.integrations.train_state import TrainState
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.data.batch import Microbatch
from etc_agent.worker.session import Session, session
from etc_agent.worker.step import Step

NAMES: Final = tuple(
    f"transformers.Trainer.{name}"
    for name in (
        "_clip_grad_norm", "_finalize_training", "_get_collator_with_removed_columns", "_get_grad_norm",
        "_get_learning_rate", "_get_num_items_in_batch", "_inner_training_loop", "_load_callback_state",
        "_maybe_log_save_evaluate", "_track_num_input_tokens", "create_accelerator_and_postprocess",
    )
)
"""What is used here beyond the documented interface; a test checks that it exists."""

_OWN_FIELDS: Final = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
"""Fields of a TrainerState that differ between ranks, or that `_Progress` carries in another form."""


def _be_a_world_of_one() -> None:
    """Until a session is opened, libraries that ask torch.distributed find one rank, and start no groups of their own:
    a worker that joins would wait in them for peers that train already."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


_be_a_world_of_one()


class ElasticTrainer(Trainer):
    """A Trainer whose job changes size while it trains.

    `global_batch`: samples per step over all ranks, at any size; every size must divide it.
    `per_device_train_batch_size` is the most that a rank takes in one forward pass; how often it accumulates follows
    from both. Each epoch takes whole global batches.

    Raises:
        EtcError: the arguments ask for what cannot change size; the message says what.
    """

    model: Any
    control: Any

    def __init__(self, *args: Any, global_batch: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._global_batch = global_batch
        self._refuse_what_cannot_change_size()

    def _refuse_what_cannot_change_size(self) -> None:
        args = self.args
        refused = {
            "optimizers=(...)": (self.optimizer, "give optimizer_cls_and_kwargs, or override create_optimizer"),
            "model_init": (self.model_init, "give the model"),
            "fsdp": (args.fsdp, "write the loop with fully_shard (docs/stacks/llama.md)"),
            "deepspeed": (args.deepspeed, "use data parallelism"),
            "fp16": (args.fp16, "use bf16"),
            "gradient_accumulation_steps": (args.gradient_accumulation_steps > 1, "give global_batch alone"),
            "auto_find_batch_size": (args.auto_find_batch_size, "choose per_device_train_batch_size"),
            f"train_sampling_strategy={args.train_sampling_strategy}": (
                args.train_sampling_strategy not in ("random", "sequential"), "choose random or sequential"
            ),
        }
        for name, (is_given, remedy) in refused.items():
            if is_given:
                raise EtcError(f"ElasticTrainer cannot change the size of a job with {name}; {remedy}")
        if not hasattr(self.train_dataset, "__getitem__") or not hasattr(self.train_dataset, "__len__"):
            raise EtcError(
                f"ElasticTrainer takes a train_dataset with an index and a length, not "
                f"{type(self.train_dataset).__name__}: a change of size continues at any sample"
            )

    # -- the loop --------------------------------------------------------------------------------------------------

    def _inner_training_loop(
        self, batch_size: int | None = None, args: Any = None, resume_from_checkpoint: str | None = None,
        trial: Any = None, ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        args = self.args
        self._evaluation = trial, ignore_keys_for_eval
        self._resume_from = resume_from_checkpoint
        self._template = self.model
        training = session(
            self._build, global_batch=self._global_batch, seed=args.seed, device=args.device,
        )
        is_random = args.train_sampling_strategy == "random"
        self._loader = training.loader(
            self.train_dataset,
            batch_size=args.per_device_train_batch_size,
            shuffle=(args.data_seed or args.seed) if is_random else None,
            num_workers=args.dataloader_num_workers,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )
        self._steps_per_epoch = int(self._loader.steps_per_epoch)
        max_steps = args.max_steps
        if max_steps <= 0:
            max_steps = math.ceil(args.num_train_epochs * self._steps_per_epoch)
        self._begin_progress(max_steps, trial)
        if dist.is_initialized():
            dist.destroy_process_group()
        with training:
            self._start_time = time.time()
            self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
            for step in training.steps(max_steps):
                if step.index % self._steps_per_epoch == 0:
                    self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
                with step:
                    self._run_step(training, step)
                if step.is_committed and self.control.should_training_stop:
                    break
            output = self._finalize_training(trial, max_steps * self._global_batch, self._start_time)
        self._leave_session()
        return output

    def _begin_progress(self, max_steps: int, trial: Any) -> None:
        """The trainer's state at the job's start, on the host; a worker that joins is given the job's."""
        self.state = TrainerState(stateful_callbacks=list(self._stateful()))
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self.state.init_training_references(self, max_steps, math.ceil(max_steps / self._steps_per_epoch), trial)
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = 0
        self._initial_num_input_tokens_seen = 0

    def _run_step(self, training: Session, step: Step) -> None:
        args, model = self.args, self.model_wrapped
        micros = list(training.microbatches(self._loader))
        num_items = self._get_num_items_in_batch([micro.batch for micro in micros], args.device)
        self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
        loss = torch.zeros((), device=args.device)
        for micro in micros:
            loss += self._accumulate(model, micro, num_items)
            if not micro.is_last:
                self.control = self.callback_handler.on_substep_end(args, self.state, self.control)
        grad_norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)
        # Over all ranks, so that what is logged does not depend on who is there then.
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        self.control = self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        learning_rate = self._get_learning_rate()
        if not step.commit():
            return
        self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)
        if args.logging_nan_inf_filter and not loss.isfinite():
            loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss
        self.state.global_step = step.index + 1
        self.state.epoch = self.state.global_step / self._steps_per_epoch
        self.control = self.callback_handler.on_step_end(args, self.state, self.control)
        self._log_save_evaluate(model, grad_norm, learning_rate)
        if self.state.global_step % self._steps_per_epoch == 0 or self.control.should_training_stop:
            self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
            self._log_save_evaluate(model, grad_norm, learning_rate)

    def _accumulate(self, model: nn.Module, micro: Microbatch, num_items: Any) -> torch.Tensor:
        """Forward and backward of one microbatch; returns its part of this rank's mean loss."""
        # A loss that is not divided by num_items is divided by this.
        self.current_gradient_accumulation_steps = 1 / micro.factor
        self.accelerator.gradient_state._set_sync_gradients(micro.is_last)
        with contextlib.nullcontext() if micro.is_last else self.accelerator.no_sync(model):
            loss = self.training_step(model, micro.batch, num_items)
        self.current_flos += float(self.floating_point_ops(micro.batch))
        self._track_num_input_tokens(micro.batch)
        return loss

    def _log_save_evaluate(self, model: nn.Module, grad_norm: Any, learning_rate: float) -> None:
        trial, ignore_keys = self._evaluation
        self._maybe_log_save_evaluate(
            self._tr_loss, grad_norm, model, trial, self.state.epoch, ignore_keys, self._start_time,
            learning_rate=learning_rate,
        )

    # -- generations -----------------------------------------------------------------------------------------------

    def _build(self, parallel: ParallelContext) -> TrainState:
        if parallel.config.num_ranks != parallel.config.dp:
            raise ValueError(f"{parallel.config}: Trainer is data parallel; the other degrees must be 1")
        # Only a copy of the trainer is asked for an optimizer, since the trainer itself may be training.
        maker = copy.copy(self)
        maker.model = maker.model_wrapped = meta_twin(self._template)
        maker.optimizer = maker.lr_scheduler = None
        optimizer = maker.create_optimizer()
        scheduler = maker.create_scheduler(num_training_steps=self.state.max_steps)
        return TrainState(
            maker.model, optimizer, scheduler, extras={"trainer": _Progress(self)}, init=self._first_values,
            activate=self._activate,
        )

    def _first_values(self, state: TrainState) -> int:
        """The values of the model that the trainer was given, or of the checkpoint to resume from."""
        given = _tensors(self._template)
        for name, tensor in _tensors(state.model).items():
            tensor.copy_(given[name])
        if self._resume_from is None:
            return 0
        folder = self._resume_from
        self.state.__dict__.update(
            (key, value)
            for key, value in vars(TrainerState.load_from_json(os.path.join(folder, "trainer_state.json"))).items()
            if key not in ("max_steps", "num_train_epochs", *_OWN_FIELDS[:2])
        )
        self._load_callback_state()
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        assert state.optimizer is not None
        assert state.scheduler is not None
        state.optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt"), map_location=self.args.device))
        state.scheduler.load_state_dict(torch.load(os.path.join(folder, "scheduler.pt")))
        return self.state.global_step

    def _activate(self, state: TrainState) -> nn.Module:
        if self._template is self.model:
            # Its values are in `state`; what `build` copies from here on are its modules.
            self._template = meta_twin(self._template)
        self.model, self.optimizer, self.lr_scheduler = state.model, state.optimizer, state.scheduler
        self.args.distributed_state = PartialState(cpu=self.args.use_cpu)
        self.create_accelerator_and_postprocess()
        self.model_wrapped = self.accelerator.prepare_model(state.model)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        return self.model_wrapped

    def _leave_session(self) -> None:
        """After the last step there are no process groups: each worker keeps its rank, and is a world of its own, so
        that what the script saves then is saved by one."""
        world = PartialState._shared_state
        world["distributed_type"], world["num_processes"] = DistributedType.NO, 1
        AcceleratorState._reset_state()
        GradientState._reset_state()
        self.model_wrapped = self.model
        self.create_accelerator_and_postprocess()

    # -- what is carried -------------------------------------------------------------------------------------------

    def _stateful(self) -> Iterator[ExportableState]:
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                yield callback


class _Progress:
    """What a trainer knows about its training, as an extra of the state: the same on every rank."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name not in _OWN_FIELDS
        }
        # It grows with every log, and only at its end.
        state["log_history"] = list(state["log_history"])
        return {
            "state": state,
            "callbacks": [callback.state()["attributes"] for callback in trainer._stateful()],
            "losses": [trainer._tr_loss.item(), trainer._total_loss_scalar],
            "steps": [trainer._globalstep_last_logged, trainer._initial_global_step],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._trainer
        vars(trainer.state).update(state_dict["state"])
        for callback, attributes in zip(trainer._stateful(), state_dict["callbacks"], strict=True):
            vars(callback).update(attributes)
        loss, trainer._total_loss_scalar = state_dict["losses"]
        trainer._tr_loss.fill_(loss)
        trainer._globalstep_last_logged, trainer._initial_global_step = state_dict["steps"]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
