"""`python docs/make_grafana.py`: write docs/grafana.json, a dashboard for `/metrics`.

Each row of the table is a panel: title, unit, and expressions by legend.
"""

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("grafana.json")
P = "nano_inference_"
M = '{model_name=~"$model"}'
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def rate(name: str, by: str = "") -> str:
    """Return the rate of a counter per second."""
    return f"sum{f' by ({by})' if by else ''} (rate({P}{name}{M}[$__rate_interval]))"


def quantiles(name: str) -> dict[str, str]:
    """Return a percentile of a histogram."""
    return {
        f"p{100 * share:g}": f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})"
        for share in (0.5, 0.9, 0.99)
    }


def gauge(name: str) -> str:
    """Return a gauge, summed over servers."""
    return f"sum ({P}{name}{M})"


PANELS: list[tuple[str, str, dict[str, str]]] = [
    (
        "Tokens a second",
        "short",
        {"sampled": rate("generation_tokens_total"), "prompt": rate("prompt_tokens_total")},
    ),
    (
        "Sequences",
        "short",
        {"running": gauge("num_requests_running"), "waiting": gauge("num_requests_waiting")},
    ),
    ("KV cache in use", "percentunit", {"held": f"avg ({P}kv_cache_usage_perc{M})"}),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Between tokens", "s", quantiles("inter_token_latency_seconds")),
    ("Whole request", "s", quantiles("e2e_request_latency_seconds")),
    ("Time in the queue", "s", quantiles("request_queue_time_seconds")),
    (
        "Prompt tokens found in the prefix cache",
        "percentunit",
        {"share": f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}"},
    ),
    (
        "Preemptions and steps",
        "short",
        {"preemptions": rate("num_preemptions_total"), "steps": rate("num_steps_total")},
    ),
    (
        "Samples that ended",
        "short",
        {"{{finished_reason}}": rate("request_success_total", "finished_reason")},
    ),
    ("Errors by status", "short", {"{{status}}": rate("request_errors_total", "status")}),
    ("Not let in", "short", {"{{reason}}": rate("admission_rejections_total", "reason")}),
    (
        "Drafts that were drawn",
        "percentunit",
        {
            "share": f"{rate('spec_decode_num_accepted_tokens_total')} / "
            f"{rate('spec_decode_num_draft_tokens_total')}"
        },
    ),
    ("Weights that a replica serves", "short", {"{{replica}}": f"{P}replica_weight_version{M}"}),
    (
        "Replicas that died, and requests moved",
        "short",
        {"deaths": rate("replica_deaths_total"), "moved": rate("requests_moved_total")},
    ),
]


def main() -> None:
    """Write the file."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels: list[dict[str, Any]] = [
        {
            "id": place + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {
                "h": HEIGHT,
                "w": WIDTH,
                "x": WIDTH * (place % COLUMNS),
                "y": HEIGHT * (place // COLUMNS),
            },
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {
                    "refId": chr(65 + number),
                    "expr": expr,
                    "legendFormat": legend,
                    "datasource": source,
                }
                for number, (legend, expr) in enumerate(drawn.items())
            ],
        }
        for place, (title, unit, drawn) in enumerate(PANELS)
    ]
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "model",
            "type": "query",
            "label": "Model",
            "datasource": source,
            "query": f"label_values({P}engine_up, model_name)",
            "includeAll": True,
            "multi": True,
            "refresh": 2,
        },
    ]
    board = {
        "uid": "nano-inference",
        "title": "nano-inference",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    TARGET.write_text(json.dumps(board, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
