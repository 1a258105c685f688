/* adapter_save.h -- the trained adapter to a folder that PEFT and adapter.h read
 *
 *     llama_save_adapter(c, world, "DIR", &state);                   on all ranks
 *
 * Tensors are f32. The folder is written as DIR.tmp and renamed when all its bytes are on the disk.
 */
#ifndef LLAMA_ADAPTER_SAVE_H
#define LLAMA_ADAPTER_SAVE_H

#include "adapter.h"
#include "checkpoint_save.h"

/* Makes the config, which must not exist; synced to the disk. */
static inline int llama_adapter_write(const llama_lora *l, const char *path, upipe_err *err)
{
    const char *comma = "";
    int bad, i;
    FILE *f = fopen(path, "wx");
    if (f == NULL) return llama_config_fail(err, path, "cannot be made: %s", strerror(errno));
    fprintf(
        f,
        "{\n  \"base_model_name_or_path\": null,\n  \"bias\": \"none\",\n  \"fan_in_fan_out\": false,\n"
        "  \"inference_mode\": true,\n  \"init_lora_weights\": true,\n  \"lora_alpha\": %.17g,\n"
        "  \"lora_dropout\": 0.0,\n  \"modules_to_save\": null,\n  \"peft_type\": \"LORA\",\n  \"r\": %d,\n"
        "  \"target_modules\": [",
        l->alpha, l->rank);
    for (i = 0; i < LLAMA_LORAS; ++i) {
        if (!(l->targets >> i & 1)) continue;
        fprintf(f, "%s\"%s\"", comma, llama_adapter_target(i));
        comma = ", ";
    }
    fprintf(f, "],\n  \"task_type\": \"CAUSAL_LM\"\n}\n");
    bad = fflush(f) != 0 || fsync(fileno(f)) != 0;
    if (bad) llama_config_fail(err, path, "cannot be written: %s", strerror(errno));
    if (fclose(f) != 0 && !bad) bad = llama_config_fail(err, path, "cannot be written: %s", strerror(errno));
    return bad ? -1 : 0;
}

/* Paths, and the list of tensors: those that are trained. */
static inline int llama_adapter_prepare(llama_save_work *s)
{
    const llama_layout *l = s->state->layout;
    upipe_err *err = &s->c->err;
    int i;
    if (snprintf(s->whole, LLAMA_PATH, "%s", s->dir) >= LLAMA_PATH ||
        snprintf(s->tmp, LLAMA_PATH, "%s.tmp", s->dir) >= LLAMA_PATH)
        return llama_config_fail(err, s->dir, "the path is too long");
    if (st_add_metadata(&s->optimizer, "format", "pt", err)) return -1;
    for (i = 0; i < l->n; ++i)
        if (!l->tensors[i].frozen &&
            llama_add_tensor(&s->optimizer, LLAMA_ADAPTER_PREFIX, &l->tensors[i], ST_F32, err))
            return -1;
    s->host = malloc(LLAMA_CHUNK);
    return s->host == NULL ? llama_config_fail(err, s->dir, "no memory for a chunk") : 0;
}

/* Rank 0 makes the files; then all write their slices. */
static inline int llama_adapter_begin(llama_save_work *s, const char *tensors)
{
    char path[LLAMA_PATH];
    upipe_err *err = &s->c->err;
    if (llama_remove(s->tmp, err)) return -1;
    if (mkdir(s->tmp, 0777) != 0)
        return llama_config_fail(err, s->tmp, "the folder cannot be made: %s", strerror(errno));
    if (llama_path_in(path, s->tmp, LLAMA_ADAPTER_CONFIG, err) ||
        llama_adapter_write(&s->state->layout->lora, path, err))
        return -1;
    return st_write_begin(&s->optimizer, tensors, err);
}

static inline int llama_adapter_slices(llama_save_work *s)
{
    const upipe_zero *z = &s->state->zero[LLAMA_WEIGHTS];
    const int half = z->dtype == UPIPE_BF16;
    if (llama_save_slices(s, &s->optimizer, 0, z, half ? (const void *)s->state->master : z->weights, 4,
                          upipe_zero_sharded(z, half ? UPIPE_ZERO_STATES : UPIPE_ZERO_WEIGHTS)))
        return -1;
    return st_write_end(&s->optimizer, &s->c->err);
}

/* What is read back is what was written; then the folder gets its name. */
static inline int llama_adapter_commit(llama_save_work *s, const char *tensors)
{
    char path[LLAMA_PATH];
    upipe_err *err = &s->c->err;
    llama_lora lora;
    if (llama_path_in(path, s->tmp, LLAMA_ADAPTER_CONFIG, err) ||
        llama_adapter_read(&lora, s->state->layout->config.layers, path, err) ||
        st_read_back(&s->optimizer, tensors, err) || llama_sync_folder(s->tmp, err))
        return -1;
    return llama_rename(s->tmp, s->whole, err);
}

/* llama_save_adapter -- writes an adapter, which alone is trained, on all ranks of the world together
 *   dir  must not exist, or be empty; the folder above it must be there
 *
 * Returns OK on all ranks or on none, as llama_save.
 */
static inline upipe_status llama_save_adapter(upipe_ctx *c, upipe_comm *world, const char *dir,
                                              const llama_state *state)
{
    char tensors[LLAMA_PATH];
    upipe_err ignored;
    int bad;
    llama_save_work *s = llama_save_work_make(c, world, dir, state);
    if (s == NULL) return c->err.status;
    bad = llama_adapter_prepare(s) || llama_path_in(tensors, s->tmp, LLAMA_ADAPTER_MODEL, &c->err);
    if (!bad && world->rank == 0) bad = llama_adapter_begin(s, tensors);
    bad = llama_save_agree(s, bad);
    if (!bad) {
        if (world->rank != 0) bad = st_write_open(&s->optimizer, tensors, &c->err);
        if (!bad) bad = llama_adapter_slices(s);
        bad = llama_save_agree(s, bad);
    }
    if (!bad) {
        if (world->rank == 0) bad = llama_adapter_commit(s, tensors);
        bad = llama_save_agree(s, bad);
    }
    if (bad && world->rank == 0) llama_remove(s->tmp, &ignored);
    st_writer_free(&s->optimizer);
    free(s->host);
    free(s);
    if (!bad) return UPIPE_OK;
    return c->err.status != UPIPE_OK ? c->err.status : UPIPE_ERR_BACKEND;
}

#endif
