"""`/metrics`, `/stats` and `/flush_cache` on a real engine."""

import importlib.util
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nano_inference.server.http.metrics import Metrics
from nano_inference.types import SpeculationStats
from tests.fleet.fleets import Made
from tests.server.engines import stats_with
from tests.server.scripted import Script

DOCS = Path(__file__).parents[3] / "docs"
STEMS = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "kv_leaked_blocks",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "grammars_compiled",
    "grammars_failed",
    "grammar_seconds",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
    "admission_rejections",
}


def read(server: str) -> dict[str, dict[str, float]]:
    text = httpx.get(server + "/metrics").text
    return {
        family.name.removeprefix("nano_inference_"): {
            sample.name.removeprefix("nano_inference_")
            + str(sample.labels.get("finished_reason", "")): sample.value
            for sample in family.samples
            if "le" not in sample.labels
        }
        for family in text_string_to_metric_families(text)
    }


@pytest.mark.thorough
def test_metrics_count_events(server: str) -> None:
    before = read(server)
    assert set(before) >= STEMS
    body = {
        "prompt": "The capital of France is",
        "max_tokens": 6,
        "ignore_eos": True,
        "temperature": 0,
        "n": 2,
    }
    assert httpx.post(server + "/v1/completions", json=body, timeout=60).status_code == 200
    assert (
        httpx.post(
            server + "/v1/completions", json=body | {"stream": True, "n": 1}, timeout=60
        ).status_code
        == 200
    )
    after = read(server)

    def grown(family: str, name: str) -> float:
        return after[family][name] - before[family].get(name, 0)

    assert grown("request_success", "request_success_totallength") == 3
    assert grown("request_generation_tokens", "request_generation_tokens_sum") == 18
    assert grown("request_params_n", "request_params_n_sum") == 3
    assert grown("e2e_request_latency_seconds", "e2e_request_latency_seconds_count") == 2
    assert grown("time_to_first_token_seconds", "time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds", "inter_token_latency_seconds_count") >= 5


def test_failover_pauses_are_a_consistent_histogram() -> None:
    made = Made(2, Script())
    metrics = Metrics(lambda: {"m": made.client})
    metrics.serve("m")
    for seconds in (0.005, 0.02, 0.02, 0.15, 0.15, 0.15, 9.0, 100.0):
        made.client.failover.paused(seconds)
    families = {
        family.name: family for family in text_string_to_metric_families(metrics.text().decode())
    }
    samples = families["nano_inference_failover_pause_seconds"].samples
    counts = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
    found = [
        counts[edge]
        for edge in ("0.01", "0.025", "0.05", "0.1", "0.2", "0.3", "5.0", "10.0", "60.0", "+Inf")
    ]
    assert found == [1, 3, 3, 3, 6, 6, 6, 7, 7, 8]
    rest = {
        sample.name.rpartition("_")[2]: sample.value
        for sample in samples
        if "le" not in sample.labels
    }
    assert rest == {"count": 8, "sum": pytest.approx(109.495)}


def test_drafts_are_counted_by_source_and_place() -> None:
    made = Made(1, Script())
    metrics = Metrics(lambda: {"m": made.client})
    metrics.serve("m")
    drafts = SpeculationStats(
        ("grammar", "suffix"),
        {"grammar": (4, 2), "suffix": (9, 5, 1)},
        {"grammar": (4, 1), "suffix": (6, 3, 0)},
        (1, 2, 4),
        (0.5, 0.75, 1.5),
    )
    for given in (None, drafts):
        made.client.stats = stats_with(speculation=given)
        text = metrics.text().decode()
        families = {each.name: each.samples for each in text_string_to_metric_families(text)}
        plain = {
            name: families[f"nano_inference_spec_decode_num_{name}"][0].value
            for name in ("drafts", "draft_tokens", "accepted_tokens", "wasted_rows")
        }
        if given is None:
            assert set(plain.values()) == {0}
            assert not [name for name in families if "per_pos" in name or "step_seconds" in name]
    assert plain == {"drafts": 13, "draft_tokens": 21, "accepted_tokens": 14, "wasted_rows": 7}
    for name, counts in (("draft", drafts.drafted), ("accepted", drafts.accepted)):
        found = {
            (sample.labels["source"], int(sample.labels["position"])): sample.value
            for sample in families[f"nano_inference_spec_decode_num_{name}_tokens_per_pos"]
        }
        assert found == {(key, i): n for key, each in counts.items() for i, n in enumerate(each)}
    costs = families["nano_inference_spec_decode_step_seconds"]
    assert {each.labels["rows"]: each.value for each in costs} == {"1": 0.5, "2": 0.75, "4": 1.5}


def test_dashboard_draws_existing_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_grafana", DOCS / "make_grafana.py")
    assert spec is not None
    assert spec.loader is not None
    make_grafana = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_grafana)
    monkeypatch.setattr(make_grafana, "TARGET", tmp_path / "grafana.json")
    make_grafana.main()
    board = (DOCS / "grafana.json").read_text()
    assert (tmp_path / "grafana.json").read_text() == board, "run python docs/make_grafana.py"
    made = Made(2, Script())
    metrics = Metrics(lambda: {"m": made.client})
    metrics.serve("m")
    made.client.stats = stats_with(speculation=None)
    # labelled metrics have no samples before their first event
    known = set(re.findall(r"^# TYPE (\S+)", metrics.text().decode(), flags=re.M))
    drawn = set(re.findall(r"nano_inference_\w+", board))
    assert len(drawn) > 20
    assert {re.sub(r"(_seconds)_bucket$", r"\1", name) for name in drawn} <= known


def test_stats(server: str) -> None:
    stats = httpx.get(server + "/stats").json()
    assert stats["status"] == "ok"
    assert stats["model"] == "smollm2"
    assert stats["queue"]["num_samples"] == 0
    assert stats["engine"]["kv_leaked_blocks"] == 0
    assert stats["engine"]["num_blocks"] > 0


@pytest.mark.parametrize("path", ["/version", "/health"])
def test_small_routes(server: str, path: str) -> None:
    assert httpx.get(server + path).status_code == 200


@pytest.mark.thorough
def test_scrape_is_of_this_moment(server: str) -> None:
    """Scrape right after an answer: its tokens are counted, not a heartbeat later."""
    for _ in range(5):
        before = read(server)["generation_tokens"]["generation_tokens_total"]
        body = {"prompt": "The capital of France is", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(server + "/v1/completions", json=body, timeout=60).status_code == 200
        assert read(server)["generation_tokens"]["generation_tokens_total"] == before + 3
