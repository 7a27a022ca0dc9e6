"""The miss-ratio curve: how a smaller or larger pool would hit, estimated from sampled prefixes (SHARDS)."""
