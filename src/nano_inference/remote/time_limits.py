"""Time limits and periods of remote engines and fleets, in seconds. Deadlines set by callers, such
as `ServerConfig.rl_timeout`, are arguments of each call instead.
"""

# -- a call of an engine operation -----------------------------------------------------------------

# Deadline of an operation that waits at most for a step.
SOON = 60.0
# Extra time for the reply of an engine that enforces a deadline itself.
MARGIN = 10.0
# Period at which a waiting update checks if it must be withdrawn.
UPDATE_LOOK = 0.1
# A live trainer's store accepts a connection within this time.
STORE_PROBE = 0.5

# -- signs of life ---------------------------------------------------------------------------------

# Period of an engine's heartbeats while it has requests, also during a step.
BEAT = 1.0
# Period of the heartbeats of an engine whose state does not change.
IDLE_BEAT = 10.0
# An engine without heartbeats for this long is silent: its process or machine has stopped.
SILENCE = 20.0
# The same for an engine with requests, which sends more heartbeats.
BUSY_SILENCE = 10.0
# Statistics younger than this are sent again instead of being collected.
STATS_AGE = 0.5
# Period of reporting the tokens of requests that do not stream, so that another engine can resume.
TELL = 0.25

# -- the end of an engine --------------------------------------------------------------------------

# Deadline for the last step of an in-process engine, before its thread is abandoned.
THREAD_STOP = 10.0
# Deadline for an engine process to exit by itself, before its standard input is closed.
PROCESS_STOP = 5.0
# Deadline for an engine process to exit after its standard input is closed, before it is killed.
HANG_UP = 2.0
# Time for an exiting process to send its last messages.
LAST_WORDS = 1.0
# Time for the last messages of an exited process to arrive.
LAST_WORDS_ARRIVE = 0.05
# Minimum age of an abandoned socket folder: a live process listens long before.
ABANDONED = 60.0

# -- the replicas of a fleet -----------------------------------------------------------------------

# Period at which a supervisor checks its replicas.
WATCH = 0.2
# Delay before a dead engine is first replaced. It doubles with each successive engine that does not
# last.
FIRST_RESTART = 0.5
# Longest delay before an engine is restarted.
LONGEST_RESTART = 30.0
# An engine that has served this long counts as lasting.
LASTING = 60.0
# Deadline for copying the weights of one replica to another.
BRING_WEIGHTS = 600.0
# Deadline for copying an adapter of one replica to another.
BRING_ADAPTER = 300.0
# Deadline for fetching a request's blocks, before they are computed instead.
BRING_BLOCKS = 30.0
# Period of the replicas' block reports.
BLOCK_REPORTS = 0.5
# Deadline for a replica's block report.
BLOCK_REPORT = 10.0
