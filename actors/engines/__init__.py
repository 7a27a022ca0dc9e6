"""The common parts of engines' connectors: look-ups, leases, copies and weights, without an engine's own types.

An engine has a scheduler process and one worker process for each tensor-parallel rank. Each process has one client of
the cache of its rank, on an event loop in a thread of its own (`CacheLink`); no thread of the engine waits for a reply.

    scheduler process                                   worker process of a rank
    SchedulerSide                                       WorkerSide
      request arrives   -> lock, with a grant             adopt the grant; the worker owns the lease from now on
      request is asked  -> the hit, or "ask again"        load: copy pages into the engine's blocks
      step is planned   -> StepPlan  ──────────────────>  save: extend, copy blocks into pages, insert
      step has ended   <── StepReport ──────────────────  request has ended: release

`raydix.actors.engines.vllm.connector` is the connector of vLLM.
"""
