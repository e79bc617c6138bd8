"""KV-cache methods other than PQCache: one file each, or one folder where a method owns a store, codec or layer."""
