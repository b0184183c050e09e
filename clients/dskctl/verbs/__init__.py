"""The verbs of dskctl, one file each."""

from dskctl.verbs import chat, generate, history, load, models, status, switch, unload, watch

ALL = (
    status.VERB,
    models.VERB,
    load.VERB,
    unload.VERB,
    switch.VERB,
    history.VERB,
    watch.VERB,
    generate.VERB,
    chat.VERB,
)
