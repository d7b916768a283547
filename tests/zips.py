"""Changing model zips as an attacker or an accident would."""

import base64
import io
import json
import zipfile

from sb3_td3x.saving import model_zip


def members(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts):
    """A zip of members, given as a table or as pairs."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items() if isinstance(parts, dict) else parts:
            archive.writestr(name, content)
    return file.getvalue()


def signed(parts):
    """Members with the checksums put right, as whoever changes a zip on purpose would."""
    plain = json.loads(parts[model_zip.PLAIN])
    plain["sha256"] = {name: model_zip._sha256(content) for name, content in parts.items() if name != model_zip.PLAIN}
    plain.pop("own sha256", None)
    plain["own sha256"] = model_zip._sha256(model_zip._canonical(plain))
    return {**parts, model_zip.PLAIN: json.dumps(plain).encode()}


def with_attributes(content, **attributes):
    """A zip with other attributes in SB3's JSON; bytes are taken as a pickle."""
    parts = members(content)
    data = json.loads(parts["data"])
    for name, value in attributes.items():
        pickled = {":type:": "?", ":serialized:": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        data[name] = pickled
    parts["data"] = json.dumps(data).encode()
    return packed(signed(parts) if model_zip.PLAIN in parts else parts)


def with_fields(content, **fields):
    """A zip with other attributes, encoded, in our own JSON (and some value in SB3's)."""
    parts = members(content)
    plain, data = json.loads(parts[model_zip.PLAIN]), json.loads(parts["data"])
    for name, value in fields.items():
        plain["fields"][name] = value
        data.setdefault(name, None)
    parts |= {model_zip.PLAIN: json.dumps(plain).encode(), "data": json.dumps(data).encode()}
    return packed(signed(parts))
