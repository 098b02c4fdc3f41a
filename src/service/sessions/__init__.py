"""Sessions: outside agents that play rollouts on the live policy, each sampled token kept once.

    request --match--> node --render what is new--> prompt --sample--> answer --store--> tree --> delivered --> export

`tree` keeps messages and tokens, `session` one agent's tree with its rewards and its end, `records` are what survives
the process, and `registry` has the verbs that the front door calls.
"""
