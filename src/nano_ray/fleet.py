"""`RayFleet`: engines on a Ray cluster for RL, with one `generate` and one weight update."""
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

AHEAD = 2  # samples to submit, per sample that fits into the replicas' batches
LOOK = 0.2  # seconds between two checks of a fleet that has lost all its replicas
NO_BACKLOG = 2**62  # no limit, since the readers here always read

T = TypeVar("T")
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Replica:
    """Status of one replica, from `RayFleet.replicas`.

    Attributes:
        name: Name of the replica. A new engine that replaces a dead one keeps it.
        state: "starting", "syncing" (it receives the weights of the others), "serving", "draining"
            or "dead".
        node: Ray's id of its node. Empty unless the replica serves.
        weight_version: Version of its weights. None unless the replica serves.
        num_starts: Number of engines started under this name.
        num_samples: Number of its running and waiting samples.
        why: Reason for the state, if there is one to report.
    """

    name: str
    state: str
    node: str
    weight_version: int | None
    num_starts: int
    num_samples: int
    why: str


class RayFleet:
    """Replicas of one engine with the interface of one. A context manager; any thread may call.

    A sample has the same bits on every replica. If a replica or its node dies, others continue its
    samples token for token, and Ray places a new replica, which first receives the live weights. If
    all replicas have died, `generate` waits for the first new one and starts over.

    Args:
        config: Configuration of every engine. `device="auto"` is a GPU if the cluster has any.
        replicas: Initial number of replicas.
        tensor_parallel: Ranks of each replica, as `EngineConfig.tensor_parallel`. All ranks of a
            replica are on one node.
        address: Address of the Ray cluster. None: the cluster that this process is connected to,
            the one in `RAY_ADDRESS`, or a new one on this machine.
        cpus_per_rank: Cores that Ray reserves. None: `config.num_threads`, or 1.
        gpus_per_rank: GPUs that Ray reserves. None: one on a GPU, otherwise none.
        patience: Seconds until a replica must be placed, and then again until it is ready.
        restart: Start a new engine for each one that has died.

    Raises `ConfigError`, `ModelLoadError`, or `EngineDead` if Ray has no room.
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
                f"tensor_parallel={tensor_parallel!r} contradicts config.tensor_parallel="
                f"{config.tensor_parallel}."
            )
        config = with_plain_weights(config)  # a trainer sends plain weights
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
        """Complete prompts. Return the samples in prompt order, like `InferenceEngine.generate`.

        One replica draws all samples of a prompt and computes the prompt once. The samples equal
        those of a single engine with the same `config.seed`, for any assignment to replicas.

        Args:
            prompts: Token ids of one prompt, or a list of prompts.
            sampling_params: Parameters for all prompts, or one per prompt.
            num_samples_per_prompt: Number of samples per prompt.
            num_wanted: Number of finished samples per prompt that are enough, as in
                `InferenceEngine.add_request`.

        Raises `EngineDead`, or `InvalidRequest` or `RequestTooLarge`, which abort all prompts.
        """
        many = many_prompts(prompts)
        all_params = params_for(sampling_params, len(many))
        info = self._client.info
        work: list[_Prompt] = []
        for prompt, params in zip(many, all_params, strict=True):
            if is_text(prompt):
                raise InvalidRequest(
                    "a fleet takes token ids; encode text with the model's tokenizer first."
                )
            token_ids = checked_ids(prompt, info.vocab_size)
            _require_fit(len(token_ids), params.max_tokens, info.max_model_len)
            if (grammar := params.grammar) is not None:
                backend_named(grammar.backend or info.grammar_backend).check(grammar)
            work.append(_Prompt(token_ids, params, num_samples_per_prompt, num_wanted))
        for prompt in work:  # ids and seeds only after all checks, in the order of a single engine
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
        """Replace all or some weights on all replicas. Return the version once it is live
        everywhere.

        Each bucket is put into Ray's object store once and copied from node to node. No replica
        draws a token with the new weights while another still uses the old ones. A replica that
        dies meanwhile leaves the fleet, and its replacement gets the new version.

        Args:
            weights: Mapping of unfused Hugging Face names to tensors on any device, or an iterable
                of pairs. Unchanged tensors may be omitted.
            timeout: Seconds until the update must be live after all tensors have arrived.
            options: Options of `InferenceEngine.update_weights`. `kv_policy=None` means "keep".

        Raises `WeightUpdateError`, with the old version live everywhere, or `EngineDead`.
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
            self._run(update.cancel(f"the trainer failed: {problem}"))
            raise
        kv_policy = options.get("kv_policy") or "keep"
        return self._run(update.finish(options.get("version"), kv_policy, timeout))

    def get_weight_version(self) -> int:
        """Return the version that is live on all replicas."""
        return self._client.supervisor.version

    def weights_checksum(self) -> dict[str, str]:
        """Return the checksums of all weights. Raises `NanoInferenceError` if replicas differ."""
        return self._run(self._call("weights_checksum", 600.0))

    # -- replicas ----------------------------------------------------------------------------------

    def replicas(self) -> tuple[Replica, ...]:
        """Return the status of all replicas, including those being restarted."""
        return self._run(self._replicas())

    def add_replicas(self, count: int) -> tuple[str, ...]:
        """Add replicas. Return their names once they serve with the live weights.

        If a replica cannot be built, none is added, and its error is raised: `EngineDead` if Ray
        has no room.
        """
        _require_count(count)
        return self._run(self._add(count))

    def remove_replicas(self, count: int) -> tuple[str, ...]:
        """Remove the newest replicas. The others continue their samples. Return the names.

        Raises `InvalidRequest` if no replica would be left.
        """
        _require_count(count)
        return self._run(self._remove(count))

    # -- control -----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause all replicas until `resume`, like `InferenceEngine.pause`.

        Raises `TimeoutError` if requests did not end in time or the fleet was resumed meanwhile.
        """
        if not self._run(self._call("pause", self._patience, mode=mode)):
            raise TimeoutError(
                f"the requests did not end within {self._patience:g} s, or the fleet was resumed."
            )

    def resume(self) -> None:
        """Resume all replicas after a pause."""
        self._run(self._call("resume"))

    def flush_cache(self) -> None:
        """Delete all cached prefixes on all replicas."""
        self._run(self._call("flush_cache"))

    def stats(self) -> EngineStats:
        """Return the statistics of all replicas, combined as for one engine."""
        return self._run(self._call("stats"))

    def shutdown(self) -> None:
        """Stop all replicas, and the cluster if this fleet started it. Running samples are lost."""
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
        """Run a coroutine on the fleet's event loop and wait for it. Ctrl-C cancels it."""
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
        """Complete all prompts. Enough are submitted to keep the replicas busy, and the others
        wait, so that they can run on replicas added later.
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
        samples: list[TrainingSample] = []
        try:
            while stream.samples_left:
                samples += [
                    delta.finished for delta in await stream.next() if delta.finished is not None
                ]
        finally:
            stream.close()
        samples.sort(key=lambda sample: sample.sample_index)
        return [
            replace(each, request_id=prompt.request_id, sampling_params=prompt.asked)
            for each in samples
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
        results = await asyncio.gather(
            *(self._client.add() for _ in range(count)), return_exceptions=True
        )
        added = [each for each in results if isinstance(each, str)]
        for problem in results:
            if isinstance(problem, BaseException):
                for name in added:
                    await self._client.remove(name)
                raise problem
        return tuple(added)

    async def _remove(self, count: int) -> tuple[str, ...]:
        names = [each.name for each in self._client.supervisor.statuses()]
        if count >= len(names):
            raise InvalidRequest(
                f"cannot remove {count} of {len(names)} replicas; at least one must remain."
            )
        gone = tuple(names[-count:])
        for name in gone:
            await self._client.remove(name)
        return gone


class _Prompt:
    """A prompt and its sampling parameters."""

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
