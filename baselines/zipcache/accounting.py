"""The compression ratios that ZipCache publishes, by its own counting. `resident_bytes` in a row is what is measured here.

    ratio = 2 n l D * 16 / (2 n l D * bits + 16 * parameters)        n rows, l tokens, D = h_kv d channels

Its Table 1 (n = 8, D = l = 4096) and the ratios of its result tables (n = 8, D = 4096) follow from the parameter counts below.
The published counts leave out:

- which tokens are salient (one bit per token and KV head, and a count per 64 tokens)
- the exact tail of generated tokens (up to `gap`), and capacity
- that models with grouped queries have fewer channels in K and V (1024 instead of 4096 for Mistral-7B), and that batches have
  other sizes, with channel parameters per row

Numbers of 16 bits stored here, per row: 4 D for keys by channel (both widths), D for the value channels' c, 2 per value token.
"""

PARAMETERS = {  # numbers of 16 bits, K and V together
    "group": lambda n, length, channels, group: 4 * n * channels * length / group,
    "token": lambda n, length, channels, group: 4 * n * length,
    "channel-token": lambda n, length, channels, group: 2 * channels + 2 * n * length,
    "channel-cst": lambda n, length, channels, group: 3 * channels + 2 * n * length,
    # two widths: the count of "channel-token" twice reproduces all five published ratios, rounded; with c, or as stored, fewer
    "mixed": lambda n, length, channels, group: 4 * channels + 4 * n * length,
}


def published_ratio(
    counting: str, bits: float, length: int, *, n: int = 8, channels: int = 4096, group: int = 32
) -> float:
    """Compression against 16 bits as the paper counts it; `counting` is a key of PARAMETERS."""
    codes = 2 * n * length * channels
    return 16 * codes / (bits * codes + 16 * PARAMETERS[counting](n, length, channels, group))


def mean_bits(saliency_ratio: float, bits_high: int = 4, bits_low: int = 2) -> float:
    """Bits per code if `saliency_ratio` of the tokens take bits_high."""
    return saliency_ratio * bits_high + (1 - saliency_ratio) * bits_low
