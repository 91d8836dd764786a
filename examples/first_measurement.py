"""A first measurement: how long does one attention call take here, and is it the right attention?

    python examples/first_measurement.py --quick

A record is `ok` only when its numbers agree with the float64 reference; any other status has a reason and no time.
"""

import argparse

import attnbench as ab


def main(quick: bool) -> None:
    """Check and time one implementation on one workload."""
    length = 128 if quick else 1024
    work = ab.Workload(batch=1, q_len=length, heads=8, kv_heads=2, head_dim=64, mask=ab.masks.causal())
    record = ab.measure("torch.sdpa", work, device="cpu", budget_s=0.2 if quick else 1.0)
    print(f"{work.title}: {record.status}")
    if record.status != "ok":
        raise SystemExit(f"torch.sdpa has no time here: {record.reason}.")

    errors, memory = record.errors, record.memory
    print(f"error against float64  {errors.forward:.1e}, {errors.forward_allowed:.1e} allowed")
    print(f"samples                {len(record.time.samples_ns)}, {record.time.outliers} of them outliers, all kept")
    print(f"clock                  {record.time.clock}")
    print(f"peak beyond inputs     {memory.peak_bytes if memory.peak_bytes is not None else memory.reason} bytes")
    for note in record.notes:
        print(f"note                   {note}")

    low, high = (edge / 1e6 for edge in record.time.ci95_ns)
    print(f"torch.sdpa is right and takes {record.time.median_ns / 1e6:.3f} ms (95 %: {low:.3f}-{high:.3f} ms) here.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape and few samples")
    main(parser.parse_args().quick)
