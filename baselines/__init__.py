"""KV-cache methods other than PQCache, one file each."""
