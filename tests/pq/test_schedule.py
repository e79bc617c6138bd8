"""Adaptive rounds: the fit, the profile's file, the one clear line without it, and rounds that rows report."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined.two_stage import TwoStage
from pqcache.api.drive import tokens
from pqcache.measure.geometries import GEOMETRIES, geometry
from pqcache.pq import PQCache, profile
from pqcache.pq.schedule import CostModel, Geometry, fit_cost, load_cost, profile_path, save_cost
from pqcache.selective import Budget, generate
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import check_architecture

CPU = torch.device("cpu")


def test_the_fit_finds_the_curves_that_made_the_points() -> None:
    x, (a, b, c) = [512, 1024, 3000, 8192, 20000], (3e-10, 2e-6, 5e-4)
    base = [4e-6 * n + 1e-3 for n in x]
    more = [y + 6 * (7e-7 * n + 2e-4) for y, n in zip(base, x, strict=True)]
    cost = fit_cost(x, [(a * n + b) * n + c for n in x], base, more, 6)
    assert cost.compute == pytest.approx((a, b, c), rel=1e-5)
    assert cost.base == pytest.approx((4e-6, 1e-3), rel=1e-5) and cost.per_round == pytest.approx(
        (7e-7, 2e-4), rel=1e-5
    )


def test_a_profile_is_kept_by_machine_and_geometry(tmp_path: Path) -> None:
    shape = Geometry.of(geometry("mistral-7b-instruct-v0.2"), "float16", m=2, b=6, kmeans_device="cpu")
    assert (shape.h, shape.h_kv, shape.d, shape.hidden, shape.intermediate) == (32, 8, 128, 4096, 14336)
    cost = CostModel((1e-9, 2e-6, 3e-4), (4e-6, 5e-3), (6e-7, 7e-4))
    path = save_cost(cost, shape, CPU, tmp_path, {"lengths": [1]})
    assert path == profile_path(shape, CPU, tmp_path) and load_cost(shape, CPU, tmp_path) == cost
    other = Geometry.of(geometry("mistral-7b-instruct-v0.2"), "float16", m=4, b=6, kmeans_device="cpu")
    with pytest.raises(ValueError, match=r"no profile .*-m4-.* method.prepare.* measures one"):
        load_cost(other, CPU, tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="unreadable profile"):
        load_cost(shape, CPU, tmp_path)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_is_a_model_the_interface_takes(name: str) -> None:
    config = geometry(name)
    check_architecture(config)
    assert ModelShape.of(config).d in (16, 96, 128)


def test_without_a_profile_it_is_refused_and_prepare_measures_one(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the line says, and once: adaptive rounds then work, and rows say how many they were."""
    monkeypatch.setattr(profile, "HOST_LENGTHS", (32, 48, 64))
    method, again = (PQCache(n_sink=8, b=3, max_iter="adaptive", budget=Budget(ratio=0.25)) for _ in range(2))
    model = deepcopy(llama).float()
    with pytest.raises(ValueError, match="max_iter=adaptive: no profile"):
        method.prepare(model, None, tmp_path)
    method.check_prepared(model.config, CPU, "float32", tmp_path)  # not refused before the weights are loaded
    method.prepare(model, torch.tensor([tokens(8, 1)]), tmp_path)
    (path,) = (tmp_path / "schedule").iterdir()
    assert {"cost", "device", "geometry", "points"} == json.loads(path.read_text()).keys()
    assert 3 <= method.rounds(100) <= 300
    stamp = path.stat().st_mtime_ns
    again.prepare(model, torch.tensor([tokens(8, 1)]), tmp_path)
    assert path.stat().st_mtime_ns == stamp and again.rounds(5000) == method.rounds(5000)
    result = generate(model, method, torch.tensor([tokens(100, 1)]), max_new_tokens=4)
    assert result.extra["kmeans_max_iter"] == method.rounds(92) >= result.extra["kmeans_iterations"] >= 1
    parts = {"first_options": {"page": 4}, "second_options": {"b": 3, "max_iter": "adaptive"}}
    composed = TwoStage(budget=Budget(ratio=0.25), n_sink=8, **parts)
    composed.prepare(model, None, tmp_path)
    generate(model, composed, torch.tensor([tokens(100, 1)]), max_new_tokens=2)


def test_workers_that_measure_at_once_use_one_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that is stored counts, also for a worker that has just measured another one."""
    shape = Geometry(8, 2, 32, 256, 512, "float32", 2, 6, "cpu")
    first, second = (CostModel((0.0, c, 0.0), (0.0, c), (0.0, c)) for c in (1.0, 2.0))

    def slow(*_: object, **__: object) -> tuple[CostModel, dict[str, object]]:
        save_cost(first, shape, CPU, tmp_path, {})
        return second, {}

    monkeypatch.setattr(profile, "measure", slow)
    assert profile.make_profile(shape, CPU, tmp_path) == first
