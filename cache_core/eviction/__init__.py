"""The order in which nodes are evicted: policies, queues, tenants' shares, retired nodes, the history."""
