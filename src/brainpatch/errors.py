"""Every error that BrainPatch raises: one table of codes, and the exception classes that carry them.

`docs/errors.md` is generated from `ERRORS`. A code is stable: it never changes its meaning, and a
retired one is never given out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class ErrorKind(NamedTuple):
    """One row of the table: what a code means and what a person can do about it."""

    title: str
    meaning: str
    remedy: str


RETIRED = frozenset({"BP408"})
"""Codes that nothing raises any more. They stay in the table, so that an old log can be read."""

ERRORS: dict[str, ErrorKind] = {
    # 1xx: the file
    "BP101": ErrorKind(
        "file not found or not readable",
        "The path does not exist, is not a regular file, or cannot be opened.",
        "Check the path and its permissions.",
    ),
    "BP102": ErrorKind(
        "not a patch file",
        "The bytes are not a ZIP archive: another kind of file, a git-lfs pointer, a saved web page, or a download that broke off.",
        "Fetch the file again and compare its size and SHA-256 with the source.",
    ),
    "BP103": ErrorKind(
        "archive structure refused",
        "The ZIP structure is ambiguous or unusual: gaps, overlaps, extra or trailing data, disagreeing headers, ZIP64, encryption, comments, directory entries.",
        "Write the file again with `brainpatch pack` or `save_patch`.",
    ),
    "BP104": ErrorKind(
        "member name refused",
        "A member's name is absolute, climbs out of the archive, is not plain text, or its type is not a regular file.",
        "A patch holds manifest.json, vectors.safetensors, checksums.json and, if wanted, README.md, at its root.",
    ),
    "BP105": ErrorKind(
        "member missing, repeated or unexpected",
        "A patch holds exactly manifest.json, vectors.safetensors and checksums.json, and may hold README.md.",
        "Write the file again with `brainpatch pack`.",
    ),
    "BP106": ErrorKind(
        "limit exceeded",
        "The archive or one of its parts is larger than the format allows.",
        "See the limits in docs/format. An honest patch of that size cannot be expressed in format 1.0.",
    ),
    "BP107": ErrorKind(
        "damaged data",
        "A member does not inflate to the size and CRC that the archive declares, or uses another method than stored or deflate.",
        "Fetch the file again.",
    ),
    "BP108": ErrorKind(
        "checksum mismatch",
        "checksums.json does not list exactly the members with the SHA-256 of their bytes.",
        "The file was changed after it was written: get it from its source again.",
    ),
    "BP109": ErrorKind(
        "malformed JSON",
        "Not strict JSON: bad UTF-8, a repeated key, NaN or Infinity, nesting too deep, a number out of range, or text after the value.",
        "Repair the JSON at the place named.",
    ),
    "BP110": ErrorKind(
        "manifest does not match the schema",
        "A field is missing, has the wrong type, or is out of its range.",
        "See the manifest's table in docs/format; the JSON Schema is `brainpatch.patch.manifest_schema()`.",
    ),
    "BP111": ErrorKind(
        "manifest contradicts itself",
        "Every field is of the right type, but two of them do not go together (a layer beyond num_layers, a repeated id, a default strength over the bound).",
        "Correct the field named.",
    ),
    "BP112": ErrorKind(
        "format version not supported",
        'This release reads format version "1.0".',
        "Update brainpatch, or ask the author for a 1.0 file.",
    ),
    "BP113": ErrorKind(
        "patch name refused",
        "A name is 1 to 64 characters: lower-case ASCII letters, digits, '.', '_' and '-', beginning with a letter or a digit, and no reserved device name.",
        "Choose another name.",
    ),
    "BP114": ErrorKind(
        "schedule refused",
        "A schedule maps generated-token indices (0 to 2147483647) to numbers of at most 1024 in absolute value, has 1 to 4096 keyframes and no index twice.",
        'Correct the schedule, for example {"0": 1.0, "20": 0.0}.',
    ),
    "BP115": ErrorKind(
        "provenance refused",
        "Provenance is an object of at most 16384 bytes with the keys that docs/format lists, and holds no data rows.",
        "Store a digest of the data, not the data.",
    ),
    "BP116": ErrorKind(
        "vectors file malformed",
        "The safetensors header or layout is wrong: sizes that disagree, overlaps, gaps, trailing bytes, a repeated or empty name.",
        "Write the vectors again with a current safetensors library, or with `save_patch`.",
    ),
    "BP117": ErrorKind(
        "vector of the wrong kind",
        "A vector is not one-dimensional of length hidden_size, or its dtype is not F16, BF16, F32 or F64.",
        "Store each vector as a flat array of hidden_size numbers.",
    ),
    "BP118": ErrorKind(
        "value is not finite",
        "A number is NaN or infinite, or becomes so in float32 or in the dtype it is stored in.",
        "Scale the vector down, or choose a wider dtype.",
    ),
    "BP119": ErrorKind(
        "vector missing",
        "An intervention names a vector that the file does not hold.",
        "Add the vector, or correct the intervention.",
    ),
    "BP120": ErrorKind(
        "README refused",
        "README.md is not UTF-8 text of at most 1 MiB.",
        "Save it as UTF-8.",
    ),
    "BP121": ErrorKind(
        "target exists",
        "The file to be written is there already.",
        "Choose another path, or pass overwrite=True (`--force`).",
    ),
    "BP122": ErrorKind(
        "patch cannot be written",
        "The output could not be stored (no space, no permission, not a folder). Nothing was left half-written.",
        "Free space or choose another folder.",
    ),
    # 2xx: patch and model
    "BP201": ErrorKind(
        "patch does not fit the model",
        "Hidden size, block count, architecture, model id or revision differ from those the patch was made for; the message lists each difference.",
        'Load the model that the patch names. If you know that they are the same, use compatibility mode "architecture" or "unsafe".',
    ),
    "BP202": ErrorKind(
        "unknown compatibility mode",
        "The mode is not one of strict, architecture, unsafe.",
        "Use one of the three.",
    ),
    # 3xx: registry and hub
    "BP301": ErrorKind(
        "patch is installed already",
        "The registry holds a patch of this name.",
        "Pass --force (overwrite=True) to replace it, or uninstall it first.",
    ),
    "BP302": ErrorKind(
        "patch is not installed",
        "Neither an installed patch nor a file has this name.",
        "`brainpatch list` shows what is installed.",
    ),
    "BP303": ErrorKind(
        "reference not understood",
        "A reference is an installed name, a path, or owner/repo[:file] of a hub.",
        "Write it in one of these ways.",
    ),
    "BP304": ErrorKind(
        "hub support is not installed",
        "Fetching from a hub needs the huggingface_hub package.",
        "pip install 'brainpatch[hub]'",
    ),
    "BP305": ErrorKind(
        "hub repository refused",
        "The repository, its revision or the file does not exist, is not accessible, or holds not exactly one .brainpatch file.",
        "Name the file: owner/repo:path/to/x.brainpatch",
    ),
    "BP306": ErrorKind(
        "offline and not in the cache",
        "The hub may not be asked, and the cache does not hold the file.",
        "Run once without --offline.",
    ),
    "BP307": ErrorKind(
        "registry cannot be used",
        "The registry's folder cannot be created, read, written or locked.",
        "Check its permissions, or set BRAINPATCH_HOME to another folder.",
    ),
    # 4xx: the request
    "BP401": ErrorKind(
        "unknown patch",
        "A patch must be installed on the model before a request can name it.",
        "Install it (enabled=False keeps it off by default), or correct the name.",
    ),
    "BP402": ErrorKind(
        "strength refused",
        "A strength is a finite number.",
        "Give a number; beyond the patch's max_abs_strength it is clamped with a warning.",
    ),
    "BP403": ErrorKind(
        "patches mapping refused",
        'patches maps a name to a strength, or to {"strength": ..., "schedule": ...}; a batch takes one mapping or a list of the prompts\' length.',
        'For example {"formal": 0.8} or {"formal": {"strength": 1, "schedule": {"0": 1, "20": 0}}}.',
    ),
    "BP404": ErrorKind(
        "generation parameter refused",
        "A generation parameter has the wrong type or is out of its range.",
        "Correct the parameter named.",
    ),
    "BP405": ErrorKind(
        "prompt refused",
        "A prompt is a string, a list of chat messages with role and content, or a list of token ids of the model's vocabulary, and not empty.",
        "Correct the prompt.",
    ),
    "BP406": ErrorKind(
        "prompt too long",
        "Prompt and answer together do not fit into the model's context.",
        "Shorten the prompt, lower max_new_tokens, or load with a larger context.",
    ),
    "BP407": ErrorKind(
        "no model is loaded",
        "The backend has no model yet, or it was unloaded.",
        "Call load_model first.",
    ),
    "BP408": ErrorKind(
        "patches are frozen while serving (not raised any more)",
        "Earlier releases could not change patches between begin_serving and end_serving.",
        "Nothing: patches may be changed at any time.",
    ),
    "BP409": ErrorKind(
        "engine is busy",
        "This engine takes one call at a time and another thread is in one, or the call would block the event loop that has to do the work.",
        "Wait for it, put the prompts into one batch, or use `astream` on an event loop.",
    ),
    "BP410": ErrorKind(
        "request's patches refused",
        "What a request carries as its resolved patches cannot be read, or does not fit this engine's model: a layer that it does not have, vectors of another width, numbers that are not finite.",
        "Make the parameters with `sampling_params(patches=...)` of a backend on this engine.",
    ),
    # 5xx: the engine
    "BP501": ErrorKind(
        "engine not available",
        "The engine's package is not installed, cannot be imported, or is a version that is not supported.",
        "`brainpatch doctor` shows what is missing, and the extras that install it.",
    ),
    "BP502": ErrorKind(
        "engine cannot do this",
        "The engine, or the way it was loaded, lacks the capability that the request needs.",
        "`brainpatch backends` shows what each engine can do.",
    ),
    "BP503": ErrorKind(
        "decoder blocks not found",
        "The model has no list of decoder blocks at a place that is known for its family.",
        "Register the location with brainpatch.backends.families.register.",
    ),
    "BP504": ErrorKind(
        "block output not understood",
        "The decoder blocks do not return the residual stream in a form that this release can edit with certainty.",
        "Use a supported family; docs/engines lists them.",
    ),
    "BP505": ErrorKind(
        "model is compiled",
        "A hook that is set after torch.compile would silently not run.",
        "Pass the model as it was before torch.compile.",
    ),
    "BP506": ErrorKind(
        "edit has no effect",
        "A test edit did not reach the residual stream, so patches would silently do nothing.",
        "Report the model and engine version; nothing was generated.",
    ),
    "BP507": ErrorKind(
        "model cannot be loaded",
        "The engine could not load the model.",
        "See the reason; check the path, the memory and the engine's arguments.",
    ),
    "BP508": ErrorKind(
        "engine failed",
        "The engine raised an error while it worked on the request.",
        "See the reason.",
    ),
    "BP509": ErrorKind(
        "logits are not finite",
        "The patched model produced NaN or infinite logits.",
        "Lower the strength, or load the model in bfloat16 or float32.",
    ),
    # 6xx: tools
    "BP601": ErrorKind(
        "contrast pairs refused",
        'A line of the pairs file is not {"positive": ..., "negative": ...}, or there are too few.',
        "See docs/learn for the form of a line.",
    ),
    "BP602": ErrorKind(
        "direction cannot be computed",
        "The two classes do not differ at the layer, or the numbers are not finite.",
        "Use other pairs or another layer.",
    ),
    "BP603": ErrorKind(
        "patch cannot be compiled",
        "The parts given to the compiler do not make a patch.",
        "See the reason.",
    ),
    "BP604": ErrorKind(
        "cannot be said as a control vector",
        "A control vector of llama.cpp adds one fixed vector after a block, at every position alike: not after block 0, not at some positions only, not by a schedule that changes.",
        "Apply the patch with an engine (docs/engines), or make one without the part named.",
    ),
    "BP605": ErrorKind(
        "conversion support is not installed",
        "Files of llama.cpp are written with the gguf package.",
        "pip install 'brainpatch[convert]'",
    ),
    "BP606": ErrorKind(
        "conversion not known",
        "The form to read or to write is none that is known, or cannot be told from the file and its name.",
        "Name the forms with --from and --to; `brainpatch convert --help` lists them.",
    ),
    # 7xx: the server
    "BP701": ErrorKind(
        "key refused",
        "The server asks for an API key, and the request has none or another one; routes that change patches need the admin key.",
        "Send the header Authorization: Bearer KEY.",
    ),
    "BP702": ErrorKind(
        "unknown model",
        "The model's name is none that is served, with or without patches behind a +.",
        "GET /v1/models lists the names.",
    ),
    "BP703": ErrorKind(
        "body too large",
        "The request's body is larger than the server takes.",
        "Send less; a patch is at most as large as the file format allows.",
    ),
    "BP704": ErrorKind(
        "body not understood",
        "The body is not a JSON object in UTF-8, or an upload is not one file.",
        "Correct the body; the header Content-Type of a JSON body is application/json.",
    ),
    "BP705": ErrorKind(
        "server is full",
        "As many requests as the server takes are in work or waiting.",
        "Try again after the seconds in Retry-After.",
    ),
    "BP706": ErrorKind(
        "server is stopping",
        "The server finishes what it works on and takes nothing new.",
        "Try another server, or this one again later.",
    ),
    "BP707": ErrorKind(
        "route takes no patches",
        "The request names patches, and its answer was made without a forward pass that had them: by a route that generates no text, or by a vLLM that lost them on the way. The answer was thrown away.",
        "Leave the patches out, or use a route that generates text. If this was one, report the version of vLLM.",
    ),
    "BP708": ErrorKind(
        "body came too slowly",
        "The body of the request was not there in time.",
        "Send it in one go.",
    ),
    "BP709": ErrorKind(
        "no such route",
        "The server has no such route; those that change patches exist only with an admin key.",
        "See docs/serving.",
    ),
    "BP710": ErrorKind(
        "patch is there already",
        "A patch of this name is on the model.",
        "Upload it with overwrite=true, or change it with PATCH.",
    ),
}


class BrainPatchError(Exception):
    """Base of all errors raised here.

    `code` is a key of `ERRORS`; `reason` says what happened in this case; `remedy` says what to do
    (the table's text unless a better one is given). `str(error)` holds all three on one line each.
    """

    def __init__(self, code: str, reason: str, remedy: str | None = None) -> None:
        super().__init__(code, reason, remedy)
        self.code = code
        self.reason = reason
        self.remedy = ERRORS[code].remedy if remedy is None else remedy

    def __str__(self) -> str:
        return f"{self.code} {ERRORS[self.code].title}: {self.reason}\n  what to do: {self.remedy}"


class PatchFormatError(BrainPatchError, ValueError):
    """The manifest, the vectors or their combination is not a valid patch."""


class PatchLoadError(PatchFormatError):
    """The file as a container is refused: missing, damaged, ambiguous or too large."""


class SafetensorsError(PatchLoadError):
    """The vectors file is malformed."""


class PatchExistsError(BrainPatchError, FileExistsError):
    """The target of a write exists, and overwriting was not asked for."""


class PatchWriteError(BrainPatchError, OSError):
    """The target could not be written; nothing was left behind."""


class PatchCompatibilityError(BrainPatchError, ValueError):
    """The patch was made for another model."""


class RegistryError(BrainPatchError, RuntimeError):
    """The registry or the hub cannot do what was asked."""


class CompileError(BrainPatchError, RuntimeError):
    """The parts given to the compiler do not make a patch, or a patch cannot be said in another form."""


class ConvertError(BrainPatchError, ValueError):
    """No conversion between the two files is known."""


class UnknownPatchError(BrainPatchError, KeyError):
    """A patch was named that is not installed on this model."""


class RequestError(BrainPatchError, ValueError):
    """A request's patches, prompt or parameters are not valid."""


class CapabilityError(BrainPatchError, NotImplementedError):
    """The engine lacks a capability that the request needs."""


class BackendNotAvailable(BrainPatchError, RuntimeError):
    """The engine is not installed or cannot be used."""


class EngineStateError(BrainPatchError, RuntimeError):
    """The engine is not in a state for this call: nothing loaded, serving, busy."""


class EngineError(BrainPatchError, RuntimeError):
    """The engine failed at its work, or its model cannot be patched.

    `answers`: where a batch failed in part (BP509), its Generations in order, None for those that failed.
    """

    answers: Sequence[Any] = ()


class ServerError(BrainPatchError, RuntimeError):
    """A server does not take a request, before any engine sees it."""


class LearnError(BrainPatchError, ValueError):
    """No direction could be made from the data given."""
