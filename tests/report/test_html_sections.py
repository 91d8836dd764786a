"""Which records share a section, and how its shapes are told apart and laid out."""

from __future__ import annotations

from typing import Any

import msgspec
from page_factory import JAX, section_of, source, timed, two_frameworks
from record_factory import CPU, unsupported, workload

from attnbench import masks
from attnbench.report.environment import section_facts
from attnbench.report.html.cells import lay_out
from attnbench.report.html.sections import gather, name_shapes


class TestSections:
    def test_frameworks_of_one_machine_share_a_section(self):
        (section,) = gather([source(*two_frameworks())])
        assert set(section.environments) == {"torch", "jax"}
        assert section.title == "Test CPU 9000 · torch 2.13.0 · jax 0.10.2 · 2 threads"

    def test_another_version_of_a_framework_starts_a_section(self):
        newer = msgspec.structs.replace(CPU, packages={"torch": "2.14.0"})
        sections = gather([source(timed("torch.sdpa", 1e6)), source(timed("torch.sdpa", 1e6, environment=newer))])
        assert [len(section.records) for section in sections] == [1, 1]

    def test_a_library_that_only_one_run_had_makes_no_section_of_its_own(self):
        more = msgspec.structs.replace(CPU, packages=CPU.packages | {"flash-attn-4": "4.0"})
        other = msgspec.structs.replace(more, packages=more.packages | {"flash-attn-4": "5.0"})
        first, second = source(timed("torch.sdpa", 1e6)), source(timed("torch.fa4", 1e6, environment=more))
        assert len(gather([first, second])) == 1
        assert len(gather([second, source(timed("torch.fa4", 1e6, environment=other))])) == 2

    def test_another_machine_starts_a_section_for_another_framework_too(self):
        other = msgspec.structs.replace(JAX, device_name="Other", cpu="Other")
        assert len(gather([source(timed("torch.sdpa", 1e6), timed("jax.xla", 1e6, environment=other))])) == 2

    def test_two_kinds_of_processor_start_two_sections_and_an_unknown_one_none(self):
        old, new = (
            msgspec.structs.replace(CPU, processor=kind) for kind in ("GenuineIntel 6-85", "GenuineIntel 6-207")
        )
        first, second, unknown = (source(timed("torch.sdpa", 1e6, environment=one)) for one in (old, new, CPU))
        assert [len(gather(two)) for two in ([first, second], [first, unknown], [unknown, second])] == [2, 1, 1]

    def test_what_differs_within_a_section_is_told_of_each(self):
        first = msgspec.structs.replace(CPU, commit="0000000")
        later = msgspec.structs.replace(CPU, commit="abc1234", variables={"OMP_NUM_THREADS": "1"})
        records = [timed("torch.sdpa", 1e6, environment=first), timed("torch.eager", 2e6, environment=later)]
        section = section_of(*records)
        facts = dict(section_facts(section.environments, section.records))
        assert facts["variables"] == ["OMP_NUM_THREADS=1"]
        assert facts["attnbench"] == ["0000000 | abc1234"]
        assert facts["fingerprint"] == [CPU.fingerprint]

    def test_a_record_without_an_environment_stays_with_its_run(self):
        homeless = msgspec.structs.replace(unsupported("torch.fa3", "no"), environment=None)
        (section,) = gather([source(timed("torch.sdpa", 1e6), homeless)])
        assert len(section.records) == 2

    def test_a_run_that_never_started_has_a_section(self):
        homeless = msgspec.structs.replace(unsupported("torch.fa3", "no"), environment=None)
        (section,) = gather([source(homeless)])
        assert section.title == "Unknown machine"

    def test_frameworks_of_a_run_stay_together_whatever_ran_before(self):
        """An older run with another jax would admit the new torch, and tear it from the jax it was timed with."""
        older = msgspec.structs.replace(JAX, packages={"jax": "0.9"})
        first = source(timed("jax.xla", 1e6, environment=older))
        second = source(timed("torch.sdpa", 1e6), timed("jax.xla", 1e6, environment=JAX))
        assert [set(section.environments) for section in gather([first, second])] == [{"torch", "jax"}, {"jax"}]
        third = source(timed("torch.sdpa", 2e6))
        assert [list(section.runs) for section in gather([first, second, third])] == [[1, 2], [0]]

    def test_what_a_framework_does_not_know_of_its_machine_is_no_difference(self):
        vague = msgspec.structs.replace(JAX, system="", cores=0)
        known = msgspec.structs.replace(CPU, system="Linux", cores=2)
        (section,) = gather(
            [source(timed("torch.sdpa", 1e6, environment=known), timed("jax.xla", 1e6, environment=vague))]
        )
        assert len(section.records) == 2

    def test_what_was_refused_elsewhere_makes_no_section(self):
        other = msgspec.structs.replace(CPU, device="cuda", device_name="Other", framework="numpy")
        refused = msgspec.structs.replace(unsupported("numpy.reference", "no"), environment=other)
        (section,) = gather([source(refused, timed("torch.sdpa", 1e6))])
        assert [record.status for record in section.records] == ["unsupported", "ok"]

    def test_anchors_are_no_records_of_the_page(self):
        assert len(section_of(timed("anchor.matmul", 1e6), timed("torch.sdpa", 1e6)).records) == 1


class TestShapes:
    def test_only_what_varies_is_said(self):
        shapes = [workload(128), workload(256, pass_="train")]
        families = name_shapes(shapes)
        assert families.constant == "4 heads of 32 · causal · float32"
        assert families.shape(shapes[1]) == "1 x 256 · train"
        assert families.family(shapes[0]) == "forward"

    def test_masks_of_arrays_go_by_their_kind_unless_two_would_read_alike(self):
        ids = [masks.block_causal([[0] * 64 + [n] * 64]) for n in (1, 2)]
        short = name_shapes([workload(128, mask=ids[0]), workload(128)])
        assert short.shape(workload(128, mask=ids[0])) == "1 x 128 · block_causal"
        both = name_shapes([workload(128, mask=mask) for mask in ids])
        assert len({both.shape(workload(128, mask=mask)) for mask in ids}) == 2

    def test_a_models_shape_goes_by_its_name_unless_two_would_read_alike(self):
        model = {"source": "somewhere", "tags": ("pi0", "train")}
        shapes = [workload(128, **model), workload(256)]
        assert name_shapes(shapes).shape(shapes[0]) == "1 x 128 · pi0 train"
        alike = [workload(128, **model), workload(128, heads=8, **model)]
        assert name_shapes(alike).shape(alike[1]) == "1 x 128 · 8 heads of 32"

    def test_words_agree_with_their_number(self):
        shapes = [workload(1, kv_len=64, heads=1), workload(2, kv_len=64)]
        families = name_shapes(shapes)
        assert families.family(shapes[0]) == "1 query · 1 head of 32"
        assert families.shape(shapes[1]) == "1 x 2 x 64 · 4 heads of 32"

    def test_one_family_has_a_name(self):
        assert name_shapes([workload(128)]).family(workload(128)) == "all shapes"


def map_cell(family: str, batch: int, n: int, **more: str) -> dict[str, Any]:
    return {"family": family, "batch": batch, "len": n, "length": f"{n}", "workload": f"{family} {batch} {n}"} | more


class TestMaps:
    def test_families_of_the_same_few_combinations_share_a_map(self):
        cells = [map_cell(family, b, n) for family in "fg" for b, n in ((16, 512), (4, 1024))]
        (one,) = lay_out(cells)
        assert (one.title, one.columns) == ("", "Batch x length (tokens)")
        assert [(cell["row"], cell["column"]) for cell in cells[:2]] == [("f", "16 x 512"), ("f", "4 x 1024")]

    def test_families_of_other_combinations_have_a_map_each_the_largest_first(self):
        small = [map_cell("f", 1, n) for n in (64, 128)]
        large = [map_cell("g", 1, n) for n in (64, 256, 512)]
        assert len(lay_out([*small, *large])) == 2
        assert {cell["map"] for cell in large} == {0}
        assert {cell["map"] for cell in small} == {1}

    def test_a_family_with_fewer_of_the_combinations_is_a_row_of_the_same_map(self):
        few = [map_cell("f", b, n) for b, n in ((16, 512),)]
        some = [map_cell("g", b, n) for b, n in ((16, 512), (4, 1024))]
        every = [map_cell("h", b, n) for b, n in ((16, 512), (4, 1024), (8, 2048))]
        assert len(lay_out(cells := [*few, *some, *every])) == 1
        assert {cell["map"] for cell in cells} == {0}
        assert [(cell["row"], cell["column"]) for cell in few] == [("f", "16 x 512")]

    def test_a_family_of_one_shape_is_on_no_map(self):
        cells = [map_cell("f", 1, 64), map_cell("g", 1, 64), map_cell("h", 1, 128), map_cell("h", 1, 256)]
        assert len(lay_out(cells)) == 1
        assert ["map" in cell for cell in cells] == [False, False, True, True]

    def test_many_combinations_make_a_row_per_batch_in_numerical_order(self):
        cells = [map_cell("f", b, n) for b in (16, 4, 1) for n in (64, 128, 256, 512, 1024)]
        (one,) = lay_out(cells)
        assert (one.title, one.columns) == ("f", "Length (tokens)")
        ordered = sorted(cells, key=lambda cell: (cell["row_place"], cell["column_place"]))
        assert list(dict.fromkeys(cell["row"] for cell in ordered)) == ["batch 1", "batch 4", "batch 16"]
        assert ordered[0]["column"] == "64"

    def test_shapes_of_models_have_rows_of_their_own_and_no_column(self):
        models = [map_cell("g", 1, n, model=f"m{n}") for n in (7, 9)]
        grid = [map_cell("f", 1, n) for n in (64, 128)]
        maps = lay_out(cells := [*models, *grid])
        assert [cell["row"] for cell in cells] == ["m7 · 1 x 7", "m9 · 1 x 9", "f", "f"]
        assert [cell.get("column") for cell in cells] == [None, None, "1 x 64", "1 x 128"]
        assert sorted(one.columns for one in maps) == ["", "Batch x length (tokens)"]
