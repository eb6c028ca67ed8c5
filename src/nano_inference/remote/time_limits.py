"""The time limits and periods of engines elsewhere and of fleets, in seconds. Deadlines of callers,
such as `ServerConfig.rl_timeout`, are not here: they come with each call.
"""

# -- a call of an engine operation -----------------------------------------------------------------

# An operation that waits for a step at most has ended by then.
SOON = 60.0
# An engine that keeps a deadline itself gets so much longer to say that it has passed.
MARGIN = 10.0
# An update that may have to be withdrawn looks for that as often as this.
UPDATE_LOOK = 0.1
# A trainer's store that lives has taken a connection by then.
STORE_PROBE = 0.5

# -- signs of life ---------------------------------------------------------------------------------

# An engine sends heartbeats so far apart while it has requests, also in the middle of a step.
BEAT = 1.0
# An engine whose state does not change sends them so far apart.
IDLE_BEAT = 10.0
# An engine that is not heard for so long is silent: its process or its machine has stopped.
SILENCE = 20.0
# The same for an engine with requests, which sends more heartbeats.
BUSY_SILENCE = 10.0
# Statistics of this age are sent again, and not collected.
STATS_AGE = 0.5
# The tokens of requests that do not stream are sent so far apart, for another engine to resume.
TELL = 0.25

# -- the end of an engine --------------------------------------------------------------------------

# The last step of an engine in this process ends by then, or its thread is left behind.
THREAD_STOP = 10.0
# An engine process ends by itself by then, or its standard input is closed.
PROCESS_STOP = 5.0
# An engine process whose standard input is closed ends by then, also in a step, or it is killed.
HANG_UP = 2.0
# The last messages of a process that ends get so long to leave it.
LAST_WORDS = 1.0
# The last messages of a process that has ended have arrived by then.
LAST_WORDS_ARRIVE = 0.05
# A folder of sockets is this old before it may count as abandoned: a process listens long before.
ABANDONED = 60.0

# -- the replicas of a fleet -----------------------------------------------------------------------

# A supervisor looks after its replicas so far apart.
WATCH = 0.2
# The first engine in the place of a dead one starts after this wait, which doubles with each engine
# in a row that does not last.
FIRST_RESTART = 0.5
# No engine waits longer to be started again.
LONGEST_RESTART = 30.0
# An engine that has served for so long has lasted.
LASTING = 60.0
# A replica gets the weights of another one in this time.
BRING_WEIGHTS = 600.0
# A replica gets an adapter of another one in this time.
BRING_ADAPTER = 300.0
# A request waits for its blocks for so long; then it computes them.
BRING_BLOCKS = 30.0
# Replicas report their blocks so far apart.
BLOCK_REPORTS = 0.5
# A replica answers with its blocks in this time.
BLOCK_REPORT = 10.0
