"""The structure of a radix tree: keys, nodes, packed slots, hashes of pages."""
