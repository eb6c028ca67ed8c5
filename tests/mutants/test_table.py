"""Every seeded fault applies to the current sources."""

from pathlib import Path

from tests.mutants.table import FAULTS

ROOT = Path(__file__).parents[2]


def test_faults_apply_to_the_current_sources() -> None:
    texts: dict[str, str] = {}
    edits = [(fault.name, edit) for fault in FAULTS for edit in fault.edits]
    counts = {}
    for name, edit in edits:
        text = texts.setdefault(edit.file, (ROOT / edit.file).read_text(encoding="utf-8"))
        counts[name, edit.file, edit.old] = text.count(edit.old)
    assert {place: count for place, count in counts.items() if count != 1} == {}


def test_faults_have_unique_names_and_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    files = {
        part for fault in FAULTS for part in fault.seen_by.split() if part.startswith("tests/")
    }
    assert {file for file in files if not (ROOT / file).exists()} == set()
