"""The cache of kind "slots": the KV of each sequence is in one row of a tensor."""
