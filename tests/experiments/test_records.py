"""Best loss and steps to within 10% and 20% of it, on histories made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.records import Record


def history(losses: dict[int, float | None]) -> Record:
    return Record(Path("run.jsonl"), validations(losses))


def validations(losses: dict[int, float | None]) -> list[dict]:
    return [{"event": "validation", "step": step, "loss": loss} for step, loss in losses.items()]


def test_the_first_step_within_the_ratio_counts() -> None:
    record = history({1000: 2.0, 2000: 1.3, 3000: 1.15, 4000: 1.05, 5000: 1.0, 6000: 1.01})
    assert record.best == 1.0
    assert record.steps_to(1.2) == 3000
    assert record.steps_to(1.1) == 4000
    assert record.steps_to(1.0) == 5000


def test_a_loss_at_the_threshold_is_within_it() -> None:
    record = history({1000: 1.2, 2000: 1.1, 3000: 1.0})
    assert (record.steps_to(1.2), record.steps_to(1.1)) == (1000, 2000)
    just_above = history({1000: 1.2 + 1e-9, 2000: 1.1 + 1e-9, 3000: 1.0})
    assert (just_above.steps_to(1.2), just_above.steps_to(1.1)) == (2000, 3000)


def test_the_best_may_come_early_and_a_later_rise_changes_nothing() -> None:
    record = history({1000: 0.5, 2000: 3.0, 3000: 0.9})
    assert (record.best, record.steps_to(1.1), record.steps_to(1.2)) == (0.5, 1000, 1000)


def test_the_threshold_is_of_the_best_of_the_whole_run_not_of_the_best_so_far() -> None:
    record = history({1000: 1.0, 2000: 1.0, 3000: 0.5, 4000: 0.54})
    assert record.steps_to(1.2) == 3000


def test_a_loss_that_was_not_finite_is_no_loss() -> None:
    record = history({1000: None, 2000: 2.0, 3000: None})
    assert (record.best, record.steps_to(1.1)) == (2.0, 2000)
    with pytest.raises(ValueError, match=r"run\.jsonl: none of the 1 validations has a finite loss"):
        _ = history({1000: None}).best
    with pytest.raises(ValueError, match="none of the 0 validations"):
        _ = history({}).best


def test_other_lines_of_a_record_do_not_count() -> None:
    lines = [{"event": "config"}, *validations({10: 4.0}), {"event": "resumed", "step": 10}, *validations({20: 2.0})]
    record = Record(Path("run.jsonl"), [*lines, {"event": "final", "best_loss": 1.0}])
    assert record.losses == {10: 4.0, 20: 2.0}
