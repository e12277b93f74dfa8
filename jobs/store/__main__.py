"""python -m jobs.store doctor, and backup: see jobs/doctor.py."""

import sys

from jobs.doctor import main

if __name__ == "__main__":
    sys.exit(main())
