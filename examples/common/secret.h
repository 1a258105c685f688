/* secret.h -- a secret that the processes of a run share, and the proof that one of them has it
 *
 *     secret s;
 *     if (secret_read(&s) != 0) return -1;                             the sentence is out
 *     if (secret_prove(&s, message, bytes, proof) != 0) ...            one side sends the message and its proof
 *     if (!secret_proven(&s, message, bytes, proof)) ...               the other side does not believe it
 *
 * The secret is what UPIPE_SECRET holds, or the file that UPIPE_SECRET_FILE names, which its owner alone may read. A
 * proof is the HMAC-SHA-256 of the message. A process without a secret proves with zeros, and believes zeros alone.
 * A message says which side sends it, and holds a number that the other side has just drawn: otherwise a proof that
 * was overheard would serve a second time. A proof hides nothing. Secrets need OpenSSL's libcrypto, and a build with
 * UPIPE_WITH_OPENSSL.
 */
#ifndef COMMON_SECRET_H
#define COMMON_SECRET_H

#include "cli.h"
#include "regular.h"

/* Bytes. Whoever has one proof can try secrets at leisure: a short one is soon found. */
enum { SECRET_LEAST = 16, SECRET_MOST = 1024, SECRET_PROOF = 32 };

typedef struct secret {
    char key[SECRET_MOST + 2]; /* a line's end may follow it */
    size_t bytes;              /* 0: there is none */
} secret;

#ifdef UPIPE_WITH_OPENSSL
#include <openssl/hmac.h>

enum { SECRET_USABLE = 1 };

static inline int secret_hmac(const secret *s, const void *message, size_t bytes, unsigned char *proof)
{
    unsigned n = 0;
    const void *done =
        HMAC(EVP_sha256(), s->key, (int)s->bytes, (const unsigned char *)message, bytes, proof, &n);
    return done != NULL && n == SECRET_PROOF ? 0 : -1;
}
#else
enum { SECRET_USABLE = 0 };

static inline int secret_hmac(const secret *s, const void *message, size_t bytes, unsigned char *proof)
{
    (void)s, (void)message, (void)bytes, (void)proof;
    return -1;
}
#endif

/* Bytes that nobody foresees. 0, or -1 if there are none. */
static inline int secret_draw(void *out, size_t bytes)
{
    FILE *f = fopen("/dev/urandom", "rb");
    const int ok = f != NULL && fread(out, 1, bytes, f) == bytes;
    if (f != NULL) fclose(f);
    return ok ? 0 : -1;
}

/* What a file holds that is its owner's alone. 0, or -1 with the sentence out. */
static inline int secret_read_file(secret *s, const char *path)
{
    const char *why = NULL;
    int64_t bytes;
    struct stat about;
    FILE *f = regular_open(path, &bytes, &why);
    if (f != NULL && (fstat(fileno(f), &about) != 0 || (about.st_mode & (S_IRWXG | S_IRWXO)) != 0))
        why = "others may open it: chmod 600";
    else if (f != NULL) {
        s->bytes = fread(s->key, 1, sizeof s->key, f);
        why = ferror(f) ? strerror(errno) : NULL;
    }
    if (f != NULL) fclose(f);
    return why == NULL ? 0 : cli_fail("UPIPE_SECRET_FILE %s is not used: %s", path, why);
}

/* secret_read -- the secret of this process's environment, if there is one; 0, or -1 with the sentence out */
static inline int secret_read(secret *s)
{
    const char *text = getenv("UPIPE_SECRET"), *path = getenv("UPIPE_SECRET_FILE");
    const char *name = path != NULL ? "UPIPE_SECRET_FILE" : "UPIPE_SECRET";
    memset(s, 0, sizeof *s);
    if (text == NULL && path == NULL) return 0;
    if (text != NULL && path != NULL) return cli_fail("UPIPE_SECRET and UPIPE_SECRET_FILE are both set");
    if (!SECRET_USABLE)
        return cli_fail("%s is set, but this program was built without OpenSSL's libcrypto", name);
    if (path != NULL && secret_read_file(s, path) != 0) return -1;
    if (text != NULL) memcpy(s->key, text, s->bytes = strnlen(text, sizeof s->key));
    while (s->bytes > 0 && (s->key[s->bytes - 1] == '\n' || s->key[s->bytes - 1] == '\r')) --s->bytes;
    if (s->bytes >= SECRET_LEAST && s->bytes <= SECRET_MOST) return 0;
    return cli_fail("the secret of %s has fewer than %d bytes, or more than %d", name, SECRET_LEAST,
                    SECRET_MOST);
}

/* secret_prove -- SECRET_PROOF bytes that only who has the secret can make of the message; 0, or -1: memory is out */
static inline int secret_prove(const secret *s, const void *message, size_t bytes, unsigned char *proof)
{
    memset(proof, 0, SECRET_PROOF);
    return s->bytes > 0 ? secret_hmac(s, message, bytes, proof) : 0;
}

/* secret_proven -- are they such? How long it takes does not say where they differ */
static inline int secret_proven(const secret *s, const void *message, size_t bytes,
                                const unsigned char *proof)
{
    unsigned char right[SECRET_PROOF];
    volatile unsigned char differ = 0;
    int i;
    if (secret_prove(s, message, bytes, right) != 0) return 0;
    for (i = 0; i < SECRET_PROOF; ++i) differ |= (unsigned char)(right[i] ^ proof[i]);
    return differ == 0;
}

#endif
