"""The verbs of dskctl, one file each."""

from dskctl.verbs import apply, chat, generate, history, load, models, noise, rollback, status, switch, unload, watch

ALL = (
    status.VERB,
    models.VERB,
    load.VERB,
    unload.VERB,
    switch.VERB,
    apply.VERB,
    rollback.VERB,
    noise.VERB,
    history.VERB,
    watch.VERB,
    generate.VERB,
    chat.VERB,
)
