"""Which orders a backend accepts, from the code of builders that split a batch as vLLM's do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ubatch_guard.step import OrderConstraint
from ubatch_guard.vllm.attention_backends import backends_in_sources, order_constraint


def split_decodes_and_prefills(metadata: object) -> None:
    """Stands for vLLM's: the decodes have to lead, the rest is free."""


def split_decodes_prefills_and_extends(metadata: object) -> None:
    """Stands for vLLM's: three sections."""


def split_dcp_context_queries(metadata: object) -> None:
    """As in ``v1/worker/cp_utils.py``."""
    split_decodes_prefills_and_extends(metadata)


class DecodesLeadBuilder:
    def build(self, metadata: object) -> None:
        split_decodes_and_prefills(metadata)


class AnyOrderBuilder:
    def build(self, metadata: object) -> None:
        pass


class ThreeSectionsBuilder:
    def build(self, metadata: object) -> object:
        def later() -> None:
            split_decodes_prefills_and_extends(metadata)

        return later


class UnderContextParallelismBuilder:
    def build(self, metadata: object) -> None:
        split_dcp_context_queries(metadata)


class ChunkedLocalBuilder(ThreeSectionsBuilder):
    """As vLLM makes the builder of a backend for chunked local attention from another one."""

    def build(self, metadata: object) -> object:
        return super().build(metadata)


def backend(builder: type) -> SimpleNamespace:
    return SimpleNamespace(get_builder_cls=lambda: builder)


@pytest.mark.parametrize(
    ("builders", "threshold", "dcp", "constraint"),
    [
        ([AnyOrderBuilder], None, False, OrderConstraint.FREE),
        ([], None, False, OrderConstraint.FREE),
        ([AnyOrderBuilder, DecodesLeadBuilder], 128, False, OrderConstraint.DECODES_LEAD),
        ([DecodesLeadBuilder], 128, True, OrderConstraint.DECODES_LEAD),
        ([DecodesLeadBuilder, ThreeSectionsBuilder], 1, False, OrderConstraint.FIXED),
        ([ChunkedLocalBuilder], 1, False, OrderConstraint.FIXED),
        ([UnderContextParallelismBuilder], None, False, OrderConstraint.FREE),
        ([UnderContextParallelismBuilder], None, True, OrderConstraint.FIXED),
    ],
)
def test_order_constraints(
    builders: list[type], threshold: int | None, dcp: bool, constraint: OrderConstraint
) -> None:
    assert order_constraint(map(backend, builders), threshold, dcp) is constraint


def test_prefill_context_parallelism_keeps_the_order() -> None:
    found = order_constraint([backend(AnyOrderBuilder)], None, prefill_context_parallel=True)
    assert found is OrderConstraint.FIXED


def test_a_backend_that_cannot_be_looked_at_keeps_the_order() -> None:
    assert order_constraint([SimpleNamespace()], None) is OrderConstraint.FIXED


def test_sources_say_the_same(tmp_path) -> None:
    folder = tmp_path / "v1" / "attention" / "backends"
    folder.mkdir(parents=True)
    text = "class {0}Backend:\n    def get_builder_cls(): ...\ndef build(m):\n    {1}(m)\n"
    (folder / "one.py").write_text(text.format("Free", "split_decodes_and_prefills"))
    (folder / "two.py").write_text(text.format("Kept", "split_decodes_prefills_and_extends"))
    (folder / "utils.py").write_text("def split_decodes_prefills_and_extends(m): ...\n")
    assert backends_in_sources(tmp_path) == (["FreeBackend"], ["KeptBackend"])
