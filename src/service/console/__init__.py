"""The web console: a run in a browser, live or finished, from the files in its directory. It only reads.

    files --reading, rollouts, sessions--> JSON --app, behind service.guard--> page/ (HTML, CSS, scripts)

`trireme watch RUN --web` serves it alone, and the service of a run has it on its own port.
"""
