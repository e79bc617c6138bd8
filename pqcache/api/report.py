"""What one call of `generate` did and cost."""

from dataclasses import dataclass

from pqcache.naming import size


@dataclass(frozen=True)
class Report:
    """What the last call of `generate` did. `print` it. Bytes are of all layers and rows."""

    method: str
    budget: str | None  # as a ratio, or tokens with "tok"; None: the method ignores it
    rows: int  # sequences in the cache: prompts times beams or samples
    prompt_tokens: float  # mean over rows; in a conversation all that came before the answer
    new_tokens: int  # of the longest answer
    # mean over decode steps, query heads and the layers that select; None without a decode step. In a conversation: of all turns
    attended_tokens: float | None
    bytes: dict[str, int]  # tier (device, host) -> bytes of the cache after the call, buffer capacity included
    content_bytes: dict[str, int]  # the same without unused capacity of buffers, which outweighs a short prompt
    peak_bytes: dict[str, int]  # tier -> its largest value
    bytes_per_step: dict[str, float]  # moved between tiers per decode step: selection, demand_fetch, refill, write_back
    full_bytes: int  # K and V of the same tokens in the model's dtype
    seconds: float  # of the whole call

    def __str__(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        rows = "" if self.rows == 1 else f"{self.rows} rows, "
        lines = [
            f"{self.method}{budget}: {rows}{self.prompt_tokens:.0f} prompt tokens, {self.new_tokens} new tokens"
            f" in {self.seconds:.2f} s"
        ]
        if self.attended_tokens is not None:
            most = self.prompt_tokens + self.new_tokens
            lines.append(f"attended: {self.attended_tokens:.0f} of up to {most:.0f} tokens per step")
        tiers = ", ".join(f"{size(count)} on {tier}" for tier, count in self.content_bytes.items() if count)
        share = sum(self.content_bytes.values()) / max(1, self.full_bytes)
        lines.append(f"cache: {tiers}; {share:.2f} of all K and V ({size(self.full_bytes)})")
        if unused := sum(self.bytes.values()) - sum(self.content_bytes.values()):
            lines[-1] += f"; {size(unused)} more are room for new tokens"
        if moved := {name: count for name, count in self.bytes_per_step.items() if count}:
            lines.append("moved per step: " + ", ".join(f"{size(n)} {name}" for name, n in moved.items()))
        return "\n".join(lines)
