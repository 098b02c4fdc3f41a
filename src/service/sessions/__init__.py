"""Sessions: outside agents that play rollouts on the live policy. Each sampled token is stored once.

    request --match--> node --render the new part--> prompt --sample--> answer --store--> tree --> delivered --> export

The module `tree` holds messages and tokens, `session` one agent's tree with its rewards and its end, `records` the rows
that survive the process, and `registry` the verbs that the gateway calls.
"""
