"""`Service`: sessions, models, samplers and the order of their requests. The state belongs to the
event loop's thread. Training runs on one training thread, and sampling in the engine.
"""

import asyncio
import logging
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nano_inference.remote import start_task
from nano_training_service.base import Adapter, Base
from nano_training_service.checkpoints import Checkpoints, Kind, Run
from nano_training_service.config import TrainServiceConfig
from nano_training_service.errors import Refused, refusal_of
from nano_training_service.futures import Future, Futures, Result
from nano_training_service.messages import (
    AdamParams,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    LoadWeights,
    LoraConfig,
    OptimStep,
    Sample,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from nano_training_service.protobuf import ForwardBackward, forward_backward_output
from nano_training_service.samplers import Samplers, Weights
from nano_training_service.sampling import sampled, sampling_params
from nano_training_service.sessions import Model, Session
from nano_training_service.trainer import Bounds, Trainer
from nano_training_service.training_thread import Job, TrainingThread

log = logging.getLogger("nano_training_service")

SWEEP = 5.0  # maximum seconds between two checks for expired sessions and results
SILENT = 30.0  # seconds after which a silent client may be dead; heartbeats come every 10


class Service:
    """Implementation of the routes.

    Args:
        config: Configuration of the service.
        base: Base model for training and sampling. Closed with the service.
        checkpoints: Checkpoints in `config.state_dir`. Closed with the service.
    """

    def __init__(self, config: TrainServiceConfig, base: Base, checkpoints: Checkpoints) -> None:
        self.config, self.base, self.checkpoints = config, base, checkpoints
        self.name = config.served_model_name or base.folder
        self.futures = Futures(config.max_pending, config.max_result_bytes, config.result_timeout)
        self.sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers = Samplers(base, config.max_samplers)
        self._sampler_sessions: dict[str, Session] = {}
        self._training = TrainingThread(config)
        self._tasks: set[asyncio.Task[None]] = set()
        self._bounds = Bounds(base.max_model_len, base.vocab_size, config.max_request_tokens)

    # -- sessions ----------------------------------------------------------------------------------

    def create_session(self, about: CreateSession) -> Session:
        """Create a session."""
        made = Session(str(uuid.uuid4()), about, time.monotonic())
        self.sessions[made.session_id] = made
        return made

    def session(self, session_id: str) -> Session:
        """Return a live session. Raises `Refused`: 404 if it is unknown, 410 if it has ended."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Refused(f"there is no session {session_id!r}.", 404)
        if session.ended:
            raise Refused(f"the session {session_id!r} has ended.", 410)
        session.seen = time.monotonic()
        return session

    def end_session(self, session: Session, why: str) -> None:
        """End a session: cancel its samples and waiting requests, and free its models. A batch or
        step that is already running completes.
        """
        if session.ended:
            return
        session.ended = True
        log.info("ending session %s: %s", session.session_id, why)
        for future in session.sampling:
            if future.task is not None:
                future.task.cancel()
        for model in session.models.values():
            for job in model.waiting.values():
                job.finish(Refused(why, 410))
            model.waiting.clear()
            self._training.call(self._close_model, model)
        for name in session.samplers:
            self._sampler_sessions.pop(name, None)

    def _close_model(self, model: Model) -> None:
        """Free a model. Runs on the training thread, after the model's earlier jobs."""
        model.trainer = None
        self.checkpoints.drop_snapshots(model.run.run_id)
        self._models.pop(model.run.run_id, None)

    # -- models ------------------------------------------------------------------------------------

    def create_model(self, request: CreateModel) -> Future:
        """Create an adapter. A rejection is the result of the future."""

        def run_of(run_id: str) -> Run:
            self._require_base(request.base_model)
            self._require_adamw(request.optimizer_config)
            if request.lora_config is None:
                raise Refused("lora_config is missing; this service trains only LoRA adapters.")
            return self._new_run(run_id, request.lora_config, request.user_metadata)

        return self._add_model(request.session_id, request.model_seq_id, run_of, self._make_trainer)

    def load_weights(self, request: LoadWeights) -> Future:
        """Load a checkpoint into a model, or into a new one."""
        if request.weights_access_token is not None:
            raise Refused(
                "weights_access_token is not supported: this service has no accounts; leave it out."
            )
        if request.model_id is not None:
            model = self.model(request.model_id)
            return self._in_order(model, request.seq_id, lambda: self._load_into(model, request))
        if request.session_id is None or request.model_seq_id is None:
            raise Refused(
                "load_weights requires model_id and seq_id, or session_id and model_seq_id."
            )

        def run_of(run_id: str) -> Run:
            if request.base_model is not None:
                self._require_base(request.base_model)
            self._require_adamw(request.optimizer_config)
            old = self.checkpoints.run(self.checkpoints.find(request.path).run_id)
            now = time.time()
            return replace(
                old,
                run_id=run_id,
                user_metadata=request.user_metadata,
                created=now,
                last_request=now,
            )

        def work(model: Model) -> Result:
            self._make_trainer(model)
            return self._load_into(model, request)

        return self._add_model(request.session_id, request.model_seq_id, run_of, work)

    def _add_model(
        self,
        session_id: str,
        number: int,
        run_of: Callable[[str], Run],
        work: Callable[[Model], Result],
    ) -> Future:
        """Add a model to a session. `run_of` returns the record for an id or raises `Refused`, and
        a rejection is the result of the future. `work` builds the model on the training thread. If
        it fails, the model is removed.
        """
        session = self.session(session_id)
        run_id = f"{session.session_id}:train:{number}"
        if (known := self.futures.known(f"{run_id}:0")) is not None:
            return known
        future = self.futures.new(f"{run_id}:0", run_id)
        try:
            model = self._new_model(session, run_of(run_id))
        except Exception as problem:  # the disk may be full
            future.finish(refusal_of(problem, f"request {future.request_id}"))
        else:
            self._training.submit(
                Job(future, lambda: work(model), lambda _: self._close_model(model))
            )
        return future

    def model(self, model_id: str) -> Model:
        """Return a model in training. Raises `Refused`: 404 if unknown, 410 if it has ended."""
        model = self._models.get(model_id)
        if model is None:
            raise Refused(f"there is no model {model_id!r} in training.", 404)
        self.session(model.session.session_id)
        return model

    def run_batch(self, request: ForwardBackward) -> Future:
        """Run `forward_backward` or `forward`."""
        model = self.model(request.model_id)

        def work() -> Result:
            result = model.require_trainer().run_batch(request)
            return forward_backward_output({"logprobs": result.logprobs}, {"loss:sum": result.loss})

        def undone(why: str) -> None:
            if model.trainer is not None:
                model.trainer.fail_batch(why)

        return self._in_order(model, request.seq_id, work, None if request.forward_only else undone)

    def optim_step(self, request: OptimStep) -> Future:
        """Run a step of AdamW."""
        model = self.model(request.model_id)
        begun = False

        def work() -> Result:
            nonlocal begun
            trainer, begun = model.require_trainer(), True
            try:
                if request.optimizer_params is not None or request.adam_params is None:
                    raise Refused("this service supports only AdamW; send AdamParams.")
                params = AdamParams.model_validate(request.adam_params)
            except ValidationError as problem:
                first = problem.errors()[0]
                raise Refused(f"adam_params.{first['loc'][0]}: {first['msg']}.") from None
            return {"metrics": trainer.optim_step(params), "type": "optim_step"}

        def undone(_: str) -> None:
            if not begun and model.trainer is not None:
                model.trainer.drop_gradients()

        return self._in_order(model, request.seq_id, work, undone)

    def save_weights(self, request: SaveWeights) -> Future:
        """Save a checkpoint of the adapter and its optimizer."""
        model = self.model(request.model_id)

        def work() -> Result:
            name = request.path or f"checkpoint-{request.seq_id:06d}"
            path = self._save(model, "weights", name, request, overwrite=request.overwrite)
            return {"type": "save_weights", "path": path}

        return self._in_order(model, request.seq_id, work)

    def save_for_sampler(self, request: SaveForSampler) -> Future:
        """Save weights to sample from, under a name or for a new sampling session."""
        model = self.model(request.model_id)
        reply: dict[str, Any] = {"type": "save_weights_for_sampler"}
        if request.path is not None:
            name = request.path

            def named() -> Result:
                return {**reply, "path": self._save(model, "sampler_weights", name, request)}

            return self._in_order(model, request.seq_id, named)
        if request.sampling_session_seq_id is None:
            raise Refused("save_weights_for_sampler requires path or sampling_session_seq_id.")
        sampler_id = f"{model.session.session_id}:sample:{request.sampling_session_seq_id}"
        loop = asyncio.get_running_loop()

        def nameless() -> Result:
            model.num_snapshots += 1
            number = model.num_snapshots
            folder = self.checkpoints.write_snapshot(
                model.run.run_id, number, model.require_trainer().save_adapter
            )
            loop.call_soon_threadsafe(
                self._add_snapshot, model, number, folder, sampler_id, request
            )
            return {**reply, "sampling_session_id": sampler_id}

        return self._in_order(model, request.seq_id, nameless)

    def save_external(self, request: SaveExternal) -> Future:
        """Save an adapter for download."""
        model = self.model(request.model_id)

        def work() -> Result:
            if request.age_encryption_recipients is not None:
                raise Refused("age_encryption_recipients is not supported; leave it out.")
            path = self._save(model, "external_weights", request.path, request)
            return {"type": "save_weights_external", "path": path}

        return self._in_order(model, request.seq_id, work)

    def _save(
        self,
        model: Model,
        kind: Kind,
        name: str,
        request: SaveWeights | SaveForSampler | SaveExternal,
        *,
        overwrite: bool = False,
    ) -> str:
        """Save a checkpoint on the training thread and return its path. The optimizer is included
        only if `kind` is "weights".
        """
        trainer, trains = model.require_trainer(), kind == "weights"
        made = self.checkpoints.write(
            model.run.run_id,
            kind,
            name,
            trainer.save if trains else trainer.save_adapter,
            trainer.size(optimizer=trains),
            overwrite=overwrite,
            ttl=request.ttl_seconds,
            user_metadata=None if isinstance(request, SaveExternal) else request.user_metadata,
        )
        self._touch(model)
        return made.path

    def info(self, model: Model) -> dict[str, Any]:
        """Return the reply of `/get_info`."""
        return {
            "type": "get_info",
            "model_id": model.run.run_id,
            "model_name": self.name,
            "is_lora": True,
            "lora_rank": model.run.rank,
            "optimizer_config": {"type": "adamw"},
            "model_data": {
                "arch": self.base.architecture,
                "model_name": self.name,
                "tokenizer_id": self.base.folder,
            },
        }

    def _touch(self, model: Model) -> None:
        model.run = replace(model.run, last_request=time.time())
        self.checkpoints.write_run(model.run)

    def _add_snapshot(
        self, model: Model, number: int, folder: Path, sampler_id: str, request: SaveForSampler
    ) -> None:
        model.snapshots[number] = folder
        if request.kind == "inflight":
            model.inflight.folder = folder
        weights = model.inflight if request.kind == "inflight" else Weights(folder)
        if not model.session.ended:
            self._add_sampler(model.session, sampler_id, weights)
        for old in list(model.snapshots)[: -self.config.max_snapshots]:
            if model.snapshots[old] != model.inflight.folder:  # a sampler still uses that one
                gone = model.snapshots.pop(old)
                self._training.call(shutil.rmtree, gone, True)  # ignores errors

    def _new_run(self, run_id: str, lora: LoraConfig, user_metadata: dict[str, Any] | None) -> Run:
        if not 1 <= lora.rank <= self.config.max_rank:
            raise Refused(
                f"rank={lora.rank} must be between 1 and {self.config.max_rank} (max_rank)."
            )
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise Refused("nothing to train; set train_attn, train_mlp or train_unembed.")
        if lora.seed is not None and not 0 <= lora.seed < 2**63:
            raise Refused(f"seed={lora.seed} must be in [0, 2**63).")
        now = time.time()
        return Run(
            run_id=run_id,
            base_model=self.name,
            rank=lora.rank,
            seed=secrets.randbits(32) if lora.seed is None else lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            user_metadata=user_metadata,
            created=now,
            last_request=now,
        )

    def _new_model(self, session: Session, run: Run) -> Model:
        if run.run_id in self._models:
            raise Refused(f"the model {run.run_id!r} already exists.", 409)
        if len(self._models) >= self.config.max_models:
            raise self._too_many_models()
        self.checkpoints.write_run(run)
        made = self._models[run.run_id] = session.models[run.run_id] = Model(run, session)
        return made

    def _too_many_models(self) -> Refused:
        now, timeout = time.monotonic(), self.config.session_timeout
        silent = [
            now - model.session.seen
            for model in self._models.values()
            if now - model.session.seen > SILENT
        ]
        left = (
            f"{len(silent)} of them belong to clients that have sent nothing for at least "
            f"{min(silent):.0f} seconds. If those clients were killed, their models end "
            f"{timeout:g} seconds after the last heartbeat (--session-timeout). "
            if silent
            else ""
        )
        return Refused(
            f"{len(self._models)} models are in training, and the limit is "
            f"{self.config.max_models} (--max-models). {left}Close a client that you do not need, "
            "wait, or start the service with a larger --max-models or a shorter --session-timeout."
        )

    def _make_trainer(self, model: Model) -> Result:
        """Build a model's trainer. Runs on the training thread."""
        run = model.run
        adapter = Adapter(run.rank, run.seed, run.train_attn, run.train_mlp, run.train_unembed)
        policy = self.base.new_policy(run.run_id, adapter)
        model.trainer = Trainer(policy, self._bounds)
        return {"type": "create_model", "model_id": run.run_id}

    def _load_into(self, model: Model, request: LoadWeights) -> Result:
        """Load a checkpoint into a model. Runs on the training thread."""
        trainer = model.require_trainer()
        checkpoint = self.checkpoints.find(request.path)
        theirs, mine = self.checkpoints.run(checkpoint.run_id), model.run
        for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
            if getattr(theirs, name) != getattr(mine, name):
                raise Refused(
                    f"{request.path} has {name}={getattr(theirs, name)}, but this model has "
                    f"{getattr(mine, name)}."
                )
        trainer.load(checkpoint.folder, optimizer=request.optimizer)
        return {"type": "load_weights", "path": checkpoint.path, "model_id": mine.run_id}

    def _require_base(self, name: str) -> None:
        if name not in (self.name, self.base.model, self.base.folder):
            raise Refused(f"base_model must be {self.name!r}; got {name!r}.")

    def _require_adamw(self, config: dict[str, Any] | None) -> None:
        if config is not None and config.get("type") != "adamw":
            raise Refused(f"optimizer type must be 'adamw'; got {config.get('type')!r}.")

    # -- order -------------------------------------------------------------------------------------

    def _in_order(
        self,
        model: Model,
        seq_id: int | None,
        work: Callable[[], Result],
        undone: Callable[[str], None] | None = None,
    ) -> Future:
        """Submit a model's work once all lower sequence numbers have been submitted."""
        if seq_id is None or seq_id < 1:
            raise Refused(f"seq_id={seq_id} must be a positive integer.")
        request_id = f"{model.run.run_id}:{seq_id}"
        if (known := self.futures.known(request_id)) is not None:
            return known
        if seq_id < model.next_seq:
            raise Refused(f"request {seq_id} of {model.run.run_id!r} was already processed.", 410)
        future = self.futures.new(request_id, model.run.run_id)
        job = model.waiting[seq_id] = Job(future, work, undone)
        while (turn := model.waiting.pop(model.next_seq, None)) is not None:
            model.next_seq += 1
            self._training.submit(turn)
        if not job.begun and seq_id >= model.next_seq:
            self._training.expire_later(job, f"the preceding request, {seq_id - 1}, did not arrive")
        return future

    # -- samplers ----------------------------------------------------------------------------------

    def create_sampling_session(self, request: CreateSamplingSession) -> str:
        """Create a sampling session and return its id. A repeated request returns the same id."""
        session = self.session(request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in session.samplers:
            weights = self._weights(request.model_path, request.base_model)
            self._add_sampler(session, sampler_id, weights)
        return sampler_id

    def sampler(self, sampler_id: str) -> tuple[Session, Weights]:
        """Return a sampler's session and weights. Raises `Refused` 404 if it is unknown."""
        session = self._sampler_sessions.get(sampler_id)
        if session is None:
            raise Refused(f"there is no sampling session {sampler_id!r}.", 404)
        return self.session(session.session_id), session.samplers[sampler_id]

    def join(self, sampler_id: str) -> int:
        """Return a number for another client of a sampling session."""
        session, _ = self.sampler(sampler_id)
        session.num_clones += 1
        return session.num_clones

    def sample(self, request: Sample) -> tuple[Future, list[str]]:
        """Start sampling. Return the future and an id per sample. Raises `Refused` if invalid."""
        if request.sampling_session_id is not None:
            session, weights = self.sampler(request.sampling_session_id)
            number = uuid.uuid4() if request.seq_id is None else request.seq_id
            request_id = f"{request.sampling_session_id}:{number}"
        else:
            session, weights = None, self._weights(request.model_path, request.base_model)
            request_id = f"sample:{uuid.uuid4()}"
        prompt = request.prompt.tokens()
        params = sampling_params(request, prompt, self.base)
        total = request.num_samples * (len(prompt) + params.max_tokens)
        if total > self.config.max_request_tokens:
            raise Refused(
                f"the request may have {total} tokens, which exceeds the limit of "
                f"{self.config.max_request_tokens} (max_request_tokens)."
            )
        ids = [f"{request_id}:{number}" for number in range(request.num_samples)]
        if (known := self.futures.known(request_id)) is not None:
            return known, ids
        future = self.futures.new(request_id)

        async def generate() -> Result:
            async with (
                asyncio.timeout(self.config.request_timeout),
                self._samplers.use(weights) as adapter,
            ):
                samples = await self.base.generate(prompt, params, request.num_samples, adapter)
            return sampled(request, samples)

        future.task = start_task(self._sample(future, generate, session), self._tasks)
        if session is not None:
            session.sampling.add(future)
        return future, ids

    async def _sample(
        self,
        future: Future,
        generate: Callable[[], Coroutine[Any, Any, Result]],
        session: Session | None,
    ) -> None:
        try:
            future.finish(await generate())
        except asyncio.CancelledError:
            future.finish(Refused("the request was cancelled, or its session has ended.", 410))
            raise
        except Exception as problem:
            future.finish(refusal_of(problem, f"request {future.request_id}"))
        finally:
            if session is not None:
                session.sampling.discard(future)

    def cancel(self, request_id: str) -> None:
        """Cancel a running sample. Requests of other kinds cannot be cancelled."""
        known = self.futures.known(request_id)
        if known is not None and known.task is not None:
            known.task.cancel()

    def _weights(self, path: str | None, base_model: str | None) -> Weights:
        if base_model is not None:
            self._require_base(base_model)
        if path is None:
            if base_model is None:
                raise Refused("base_model or model_path is required to sample; send one of them.")
            return Weights(None)
        checkpoint = self.checkpoints.find(path)
        return Weights(checkpoint.folder, path, checkpoint.sha256)

    def _add_sampler(self, session: Session, sampler_id: str, weights: Weights) -> None:
        session.samplers[sampler_id] = weights
        self._sampler_sessions[sampler_id] = session

    # -- life --------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """End sessions without heartbeats, and delete expired results and checkpoints. Runs until
        it is cancelled.
        """
        timeout, keep = self.config.session_timeout, self.config.result_timeout
        while True:
            await asyncio.sleep(min(SWEEP, timeout / 4, keep / 4))
            now = time.monotonic()
            for session in list(self.sessions.values()):
                if not session.ended and now - session.seen > timeout:
                    self.end_session(session, f"no heartbeat arrived for {timeout:g} seconds.")
                if session.ended and now - session.seen > timeout + keep:
                    del self.sessions[session.session_id]
            self.futures.sweep()
            try:
                await asyncio.to_thread(self.checkpoints.sweep)
            except Exception:  # sessions must still end
                log.exception("cannot delete expired checkpoints")

    async def close(self) -> None:
        """End all sessions, wait for running training jobs, and shut the engine down."""
        for session in self.sessions.values():
            self.end_session(session, "the service is shutting down.")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._training.shutdown)
        await asyncio.to_thread(self.base.close)
        self.checkpoints.close()
