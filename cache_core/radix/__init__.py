"""The prefix cache over a radix tree.

`prefix_cache` has the class, with its locks and evictions, and `tree_parts` its parts. `lookup` and `insertion` have
the steps of a match and of an insert. `explain_miss` finds why a match ends, `format` prints a tree. `group_events` and
`usable_ends` publish the events of a cache with a window or states.
"""
