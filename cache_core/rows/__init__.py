"""The cache of kind "slots": each sequence has its KV in one row of a tensor."""
