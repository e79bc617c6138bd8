"""GSM8K: the short prompt of lm-eval's task, and the long prompt of PQCache."""
