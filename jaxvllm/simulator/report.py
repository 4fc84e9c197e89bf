"""Writes what a simulation found out beside the latencies: how full the pools were, and what that cost."""

from jaxvllm.bench.report import WIDTH, line
from jaxvllm.simulator.simulation import PoolResult, SimulationResult


def pools_table(result: SimulationResult) -> str:
    """Returns a section for each pool, in the form of the table of `bench serve`."""
    lines = [text for pool in result.pools for text in _pool(pool)]
    rate = result.ledger.num_arrived / result.wall_seconds if result.wall_seconds else 0.0
    lines += [f"{'Simulation':-^{WIDTH}}", line("Simulated in (s):", result.wall_seconds)]
    return "\n".join([*lines, line("Requests simulated per second:", rate), "=" * WIDTH])


def _pool(pool: PoolResult) -> list[str]:
    padding = pool.num_padding_tokens / pool.num_bucket_tokens if pool.num_bucket_tokens else 0.0
    replicas = "1 replica" if pool.num_replicas == 1 else f"{pool.num_replicas} replicas"
    return [
        f"{f'Pool {pool.name}, {replicas}':-^{WIDTH}}",
        line("Devices busy (%):", 100 * pool.device_share),
        line("Mean KV pages in use (%):", 100 * pool.timeline.mean_kv_share),
        line("Peak KV pages in use (%):", 100 * pool.timeline.peak_kv_share),
        line("Preemptions:", pool.num_preemptions),
        line("Prefix cache hits (% of prompt tokens):", 100 * pool.prefix_hit_rate),
        line("Steps:", pool.num_steps),
        line("Padding (% of computed tokens):", 100 * padding),
    ]
