"""What one run of code may use."""

DEADLINE_S = 5
"""Time from the start of the code to the end of its last call."""
CPU_S = 4
MEMORY_BYTES = 512 * 2**20
"""Address space, the interpreter's included."""
OPEN_FILES = 32
OUTPUT_BYTES = 2**20
"""What it may print; as much again may it send as results."""
MESSAGE_CHARACTERS = 200
VALUE_DEPTH = 50
"""Lists within lists in a result."""
HASHED_PARTS = 1000
"""Elements of one set or dict in a result: with chosen hashes their number costs whoever reads them its square."""
