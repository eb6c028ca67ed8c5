"""`RayFleet`: engines on the nodes of a Ray cluster, for RL: one `generate`, one weight update."""
# pyright: reportMissingImports=false

import asyncio
import itertools
import random
import threading
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, Unpack, cast

import ray
from torch import Tensor

from nano_inference.checkpoints import require_shardable
from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.engine import checked_ids, is_text, many_prompts, params_for
from nano_inference.errors import ConfigError, EngineDead, InvalidRequest, RequestTooLarge
from nano_inference.fleet import FleetError
from nano_inference.remote import EngineReplaced, EngineRestarting
from nano_inference.structured import backend_named
from nano_inference.types import (
    EngineStats,
    PauseMode,
    SamplingParams,
    TrainingSample,
    UpdateOptions,
)
from nano_ray.cluster import connect, rank_needs
from nano_ray.fleet_client import RayFleetClient
from nano_ray.kept import Bucket
from nano_ray.verl.buckets import parcels_of

AHEAD = 2  # samples that are handed out, for each one that fits into the replicas' batches
LOOK = 0.2  # seconds between two looks at a fleet that has lost all its replicas
NO_BACKLOG = 2**62  # those who wait here read

T = TypeVar("T")
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as `RayFleet.replicas` tells of it.

    Attributes:
        name: of its place in the fleet; a new engine in the place of one that has died has it too.
        state: "starting", "syncing" (it is brought to what the others have), "serving", "draining"
            or "dead".
        node: Ray's id of the node that it runs on; empty while it does not serve.
        weight_version: that it serves; None while it does not.
        num_starts: engines that had this place.
        num_samples: that run or wait there.
        why: in what state it is for a reason that is worth telling.
    """

    name: str
    state: str
    node: str
    weight_version: int | None
    num_starts: int
    num_samples: int
    why: str


class RayFleet:
    """Replicas of one engine behind the calls of one. A context manager; any thread may call.

    A sample has the same bits on every replica, so it cannot be told where it was drawn. When a
    replica or its node dies, others go on with what it had, token for token, and Ray finds a place
    for a new one, which gets the weights that serve before anything else. If all have died,
    `generate` waits for the first new one and begins again.

    Args:
        config: of every engine. `device="auto"` is a GPU where the cluster has any.
        replicas: how many there are in the beginning.
        tensor_parallel: ranks of each replica, as `EngineConfig.tensor_parallel`; all of them are
            on one node.
        address: of the Ray cluster; None: the one that this process is connected to, or that
            `RAY_ADDRESS` names, or a new one on this machine.
        cpus_per_rank: cores that Ray reserves; None: `config.num_threads`, or 1.
        gpus_per_rank: GPUs that Ray reserves; None: one each, unless on a CPU.
        patience: seconds in which a replica must have a place, and then be ready.
        restart: start a new engine in the place of one that has died.

    Raises `ConfigError`, `ModelLoadError`, or `EngineDead` where Ray has no room.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: int,
        tensor_parallel: int = 1,
        *,
        address: str | None = None,
        cpus_per_rank: float | None = None,
        gpus_per_rank: float | None = None,
        patience: float = 300.0,
        restart: bool = True,
    ) -> None:
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise ConfigError(f"replicas={replicas!r} must be a positive integer.")
        if config.tensor_parallel not in (1, tensor_parallel):
            raise ConfigError(
                f"tensor_parallel={tensor_parallel!r}, and the config says "
                f"{config.tensor_parallel}."
            )
        config = with_plain_weights(config)  # a trainer sends new ones
        self.config = config = replace(config, tensor_parallel=tensor_parallel)
        self._patience = patience
        self._seeds = (
            random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        )
        self._request_ids = itertools.count()
        self._closed = False
        self._owns_ray = connect(address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ray fleet", daemon=True
        )
        self._thread.start()
        self._made: RayFleetClient | None = None
        try:
            needs = rank_needs(config, cpus_per_rank, gpus_per_rank)
            require_shardable(config)
            self._made = RayFleetClient(
                config, needs, replicas, NO_BACKLOG, restart=restart, patience=patience
            )
            self._run(self._client.start())
        except BaseException:
            self.shutdown()
            raise

    # -- generating --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Iterable[SamplingParams],
        num_samples_per_prompt: int = 1,
        *,
        num_wanted: int | None = None,
    ) -> list[TrainingSample]:
        """Complete prompts; returns the samples prompt by prompt, as `InferenceEngine.generate`
        does.

        The samples of a prompt are drawn by one replica, which computes the prompt once. They are
        the samples of one engine with the same `config.seed`, whatever replica draws what.

        Args:
            prompts: token ids, or a list of such.
            sampling_params: one for all, or one for each prompt.
            num_samples_per_prompt: samples of each prompt.
            num_wanted: of each prompt's samples; as in `InferenceEngine.add_request`.

        Raises `InvalidRequest` or `RequestTooLarge` (the other prompts are then aborted), and
        `EngineDead`.
        """
        many = many_prompts(prompts)
        each = params_for(sampling_params, len(many))
        info = self._client.info
        work: list[_Prompt] = []
        for prompt, params in zip(many, each, strict=True):
            if is_text(prompt):
                raise InvalidRequest(
                    "a fleet takes token ids; encode text with the model's tokenizer first."
                )
            token_ids = checked_ids(prompt, info.vocab_size)
            _require_fit(len(token_ids), params.max_tokens, info.max_model_len)
            if (grammar := params.grammar) is not None:
                backend_named(grammar.backend or info.grammar_backend).check(grammar)
            work.append(_Prompt(token_ids, params, num_samples_per_prompt, num_wanted))
        for prompt in work:  # all of them are well-formed: as one engine does it
            prompt.request_id = next(self._request_ids)
            prompt.seed = (
                prompt.asked.seed if prompt.asked.seed is not None else self._seeds.getrandbits(63)
            )
        return [sample for samples in self._run(self._generate(work)) for sample in samples]

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(
        self,
        weights: Weights,
        *,
        timeout: float = 600.0,
        **options: Unpack[UpdateOptions],
    ) -> int:
        """Replace (part of) the weights of all replicas; returns the version when it serves
        everywhere.

        The bytes go once into Ray's object store, which brings them to every node, from one node to
        the next; while one replica has the old weights no other draws a token with the new ones. A
        replica that dies meanwhile leaves the fleet, and the one in its place gets the new version.

        Args:
            weights: Hugging Face names to tensors, unfused, from any device; or pairs of them, one
                after the other. Only what changed need be there.
            timeout: seconds by which it must serve once all of it has arrived.
            options: as in `InferenceEngine.update_weights`; `kv_policy` None: `"keep"`.

        Raises `WeightUpdateError`, with the old version serving everywhere, or `EngineDead`.
        """
        update = self._run(
            self._client.begin_update(
                options.get("complete", False), options.get("check_finite", False)
            )
        )
        try:
            pairs = weights.items() if isinstance(weights, Mapping) else weights
            for parcel in parcels_of(cast(Iterable[tuple[str, Tensor]], pairs)):
                self._run(update.add(Bucket(parcel.description, ray.put(parcel.content))))
        except BaseException as problem:
            self._run(update.cancel(f"the trainer's side failed: {problem}"))
            raise
        kv_policy = options.get("kv_policy") or "keep"
        return self._run(update.finish(options.get("version"), kv_policy, timeout))

    def get_weight_version(self) -> int:
        """The version that serves on all replicas."""
        return self._client.supervisor.version

    def weights_checksum(self) -> dict[str, str]:
        """As `InferenceEngine.weights_checksum`. Raises `NanoInferenceError` if replicas differ."""
        return self._run(self._call("weights_checksum", 600.0))

    # -- replicas ----------------------------------------------------------------------------------

    def replicas(self) -> tuple[Replica, ...]:
        """All replicas, also those that are being started again."""
        return self._run(self._replicas())

    def add_replicas(self, count: int) -> tuple[str, ...]:
        """Add replicas; returns their names when they serve, with the weights of the others.

        Raises what keeps one from being built, and then adds none: `EngineDead` where Ray has no
        room.
        """
        _require_count(count)
        return self._run(self._add(count))

    def remove_replicas(self, count: int) -> tuple[str, ...]:
        """Take the replicas out that came last; the others go on with what they have. Returns their
        names.

        Raises `InvalidRequest` if none would be left.
        """
        _require_count(count)
        return self._run(self._remove(count))

    # -- control -----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop all replicas until `resume`, as `InferenceEngine.pause` does.

        Raises `TimeoutError` if nothing is paused: requests did not end in time, or it was resumed.
        """
        if not self._run(self._call("pause", self._patience, mode=mode)):
            raise TimeoutError(
                f"the requests did not end within {self._patience:g} s, or it was resumed."
            )

    def resume(self) -> None:
        """Go on after a pause."""
        self._run(self._call("resume"))

    def flush_cache(self) -> None:
        """Forget every cached prefix, everywhere."""
        self._run(self._call("flush_cache"))

    def stats(self) -> EngineStats:
        """Of all replicas, as if they were one engine."""
        return self._run(self._call("stats"))

    def shutdown(self) -> None:
        """End all replicas, and the cluster if it was started here. What runs is lost."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._made is not None:
                asyncio.run_coroutine_threadsafe(self._made.close(), self._loop).result(60.0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)
            if self._owns_ray:
                ray.shutdown()

    def __enter__(self) -> "RayFleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def _client(self) -> RayFleetClient:
        assert self._made is not None
        return self._made

    # -- on the event loop -------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the fleet's event loop, and wait for it. Ctrl-C cancels it."""
        if self._closed:
            work.close()
            raise EngineDead("the fleet was shut down; build a new one.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except (FleetError, EngineRestarting) as problem:
            raise EngineDead(str(problem)) from problem
        except BaseException:
            future.cancel()
            raise

    async def _call(self, name: str, seconds: float = 60.0, **arguments: Any) -> Any:
        return await self._client.call(name, timeout=seconds, **arguments)

    async def _generate(self, work: list["_Prompt"]) -> list[list[TrainingSample]]:
        """All prompts; as many at once as keep all replicas busy, so that a new replica finds
        something to do.
        """
        running: dict[asyncio.Task[list[TrainingSample]], int] = {}
        tasks: list[asyncio.Task[list[TrainingSample]]] = []
        try:
            for prompt in work:
                while (
                    running
                    and sum(running.values()) + prompt.num_samples
                    > AHEAD * self._client.info.max_batch_size
                ):
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                        del running[task]
                task = asyncio.create_task(self._samples(prompt))
                running[task] = prompt.num_samples
                tasks.append(task)
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _samples(self, prompt: "_Prompt") -> list[TrainingSample]:
        while True:
            try:
                return await self._samples_once(prompt)
            except (EngineReplaced, EngineRestarting):
                pass
            while self._client.restarting:
                await asyncio.sleep(LOOK)

    async def _samples_once(self, prompt: "_Prompt") -> list[TrainingSample]:
        params = replace(prompt.asked, seed=prompt.seed)
        stream = self._client.submit(
            prompt.token_ids, params, prompt.num_samples, stream=False, num_wanted=prompt.num_wanted
        )
        found: list[TrainingSample] = []
        try:
            while stream.samples_left:
                found += [
                    delta.finished for delta in await stream.next() if delta.finished is not None
                ]
        finally:
            stream.close()
        found.sort(key=lambda sample: sample.sample_index)
        return [
            replace(each, request_id=prompt.request_id, sampling_params=prompt.asked)
            for each in found
        ]

    async def _replicas(self) -> tuple[Replica, ...]:
        nodes = self._client.nodes()
        return tuple(
            Replica(
                name=each.name,
                state=each.state,
                node=nodes.get(each.name, ""),
                weight_version=each.weight_version,
                num_starts=each.num_starts,
                num_samples=each.waiting + each.running,
                why=each.why,
            )
            for each in self._client.supervisor.statuses()
        )

    async def _add(self, count: int) -> tuple[str, ...]:
        found = await asyncio.gather(
            *(self._client.add() for _ in range(count)), return_exceptions=True
        )
        added = [each for each in found if isinstance(each, str)]
        for problem in found:
            if isinstance(problem, BaseException):
                for name in added:
                    await self._client.remove(name)
                raise problem
        return tuple(added)

    async def _remove(self, count: int) -> tuple[str, ...]:
        names = [each.name for each in self._client.supervisor.statuses()]
        if count >= len(names):
            raise InvalidRequest(
                f"there are {len(names)} replicas; {count} cannot be removed, one has to stay."
            )
        gone = tuple(names[-count:])
        for name in gone:
            await self._client.remove(name)
        return gone


class _Prompt:
    """A prompt and what is asked of it."""

    request_id: int
    seed: int

    def __init__(
        self, token_ids: list[int], asked: SamplingParams, num_samples: int, num_wanted: int | None
    ) -> None:
        if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples < 1:
            raise InvalidRequest(
                f"num_samples_per_prompt={num_samples!r} must be a positive integer."
            )
        self.token_ids, self.asked, self.num_samples, self.num_wanted = (
            token_ids,
            asked,
            num_samples,
            num_wanted,
        )


def _require_fit(prompt_len: int, max_tokens: int, max_model_len: int) -> None:
    if prompt_len + max_tokens > max_model_len:
        raise RequestTooLarge(
            f"prompt ({prompt_len}) and max_tokens={max_tokens} exceed "
            f"max_model_len={max_model_len} of the replicas."
        )


def _require_count(count: Any) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidRequest(f"count={count!r} must be a positive integer.")
