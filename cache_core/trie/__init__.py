"""The node of `RadixTrie`, and its tokens."""
