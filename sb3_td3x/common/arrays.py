"""Arrays as ``np.savez`` writes them: uncompressed, numbers only."""

import zipfile
from pathlib import Path

import numpy as np


def read(path: Path) -> dict[str, np.ndarray]:
    """
    :return: the arrays of an npz file, which take no more memory than the file
    :raises ValueError: if it is damaged, holds objects, or is compressed (a small file could fill the memory)
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            packed = any(one.compress_type != zipfile.ZIP_STORED for one in members)
            if packed or sum(one.file_size for one in members) > path.stat().st_size:
                raise ValueError("it is compressed")
            for one in members:
                with archive.open(one) as member:
                    # numpy reads no pickles unless asked to
                    found[one.filename.removesuffix(".npy")] = np.lib.format.read_array(member)
    except (OSError, ValueError):
        raise
    except Exception as error:  # those of zipfile, struct and numpy have no common class
        raise ValueError(str(error)) from error
    return found
