"""`python -m gradscope`: the same as `gradscope`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
        del sys.path[0]  # files of the working directory are not to take the place of libraries
    from gradscope.cli import main

    main()
