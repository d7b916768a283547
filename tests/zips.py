"""Changing saved models as an attacker or an accident would."""

import base64
import io
import json
import pickle
import zipfile

import torch as th


def members(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


def with_attributes(content, **attributes):
    """A saved model with other attributes. Bytes are taken as a pickle; what JSON cannot hold is pickled, as SB3 does."""
    parts = members(content)
    data = json.loads(parts["data"])
    for name, value in attributes.items():
        try:
            json.dumps(value)
            data[name] = value
        except TypeError:
            pickled = value if isinstance(value, bytes) else pickle.dumps(value)
            data[name] = {":type:": "?", ":serialized:": base64.b64encode(pickled).decode()}
    return packed({**parts, "data": json.dumps(data).encode()})


def with_pickle(content, attack):
    """A file of ``torch.save`` with another pickle inside."""
    parts = members(content)
    name = next(name for name in parts if name.endswith("data.pkl"))
    return packed({**parts, name: attack})


def with_tensors(content, member, change):
    """A saved model with a change in one of its files of tensors, which may give another state dict."""
    parts = members(content)
    state, file = th.load(io.BytesIO(parts[member]), weights_only=True), io.BytesIO()
    changed = change(state)
    th.save(changed if hasattr(changed, "_metadata") else state, file)
    return packed({**parts, member: file.getvalue()})
