"""Sessions: outside agents that play rollouts on the live policy, each sampled token kept once.

    request --match--> node --render the new part--> prompt --sample--> answer --store--> tree --> delivered --> export

`tree` keeps messages and tokens, `session` one agent's tree with its rewards and its end, `records` are the rows that
survive the process, and `registry` has the verbs that the gateway calls.
"""
