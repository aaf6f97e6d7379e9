// Drafts by n-grams for all sequences of a step: what replicas/speculation/ngrams.py describes.
//
// An index is a text and a chain over its pairs of neighbouring tokens, as in LZ77. A position is a number of tokens before
// it; 0 is none. `pairs` leads from a pair's slot to the latest position behind such a pair, `older` from each position to
// the one before it in its slot. `singles` does the first for single tokens. A position is entered when a token follows it.
//
// The calls read and write a few kilobytes for each sequence, so one thread makes them, holding the interpreter: to give it
// away and take it back would cost more.

#include <stdint.h>

#ifdef SOURCE  // compiled once besides: the digest of this file and lanes.h
const uint64_t ngrams_source = SOURCE;
#else

enum { WINDOW = 32, CANDIDATES = 128, GAP = -1 };  // mirrored by ngrams.py
enum { NOTHING = -2 };                             // before the first token

// Mirrored by ngrams.py. `room` is the length of `tokens` and `older`.
typedef struct {
    int32_t *tokens, *older, *pairs, *singles;
    int64_t length, room, shift;
} Index;

// Drafts by slot, mirrored by ngrams.py. `drafts` [slots][most]; `predicted` is -1 where the model predicts nothing.
typedef struct {
    Index **index;
    int32_t *drafts, *lengths, *matched, *predicted;
    double *acceptance, *predictions;
    int64_t most;
    double weight;
    const double *by_match;
} Drafts;

typedef struct {
    int64_t length, end;  // so many tokens before `end` are those at a text's end; 0: none
} Match;

// ---- the index ----

static uint32_t mixed(uint32_t value, int64_t shift) { return value * 0x85EBCA6Bu >> shift; }

static uint32_t pair_slot(int32_t before, int32_t last, int64_t shift) {
    return mixed((uint32_t)before * 0x9E3779B1u + (uint32_t)last, shift);
}

// Adds tokens at the end. Returns 0, and adds nothing, where there is no room for all.
int64_t ngrams_extend(Index *index, const int32_t *tokens, int64_t count) {
    if (count > index->room - index->length) return 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t end = index->length;
        if (end > 0) {
            const int32_t last = index->tokens[end - 1], before = end > 1 ? index->tokens[end - 2] : NOTHING;
            int32_t *newest = index->pairs + pair_slot(before, last, index->shift);
            index->older[end] = *newest;
            *newest = (int32_t)end;
            index->singles[mixed((uint32_t)last, index->shift)] = (int32_t)end;
        }
        index->tokens[end] = tokens[i];
        index->length = end + 1;
    }
    return 1;
}

// Where more than `above` of the `count` tokens before `text` occur: the longest match, of equals the latest.
static Match longest(const Index *index, const int32_t *text, int64_t count, int64_t above) {
    Match found = {0, 0};
    const int64_t most = count < WINDOW ? count : WINDOW;
    if (most < 1) return found;
    int64_t best = above > 1 ? above : 1;
    int32_t end = most > best ? index->pairs[pair_slot(text[-2], text[-1], index->shift)] : 0;
    for (int64_t n = 0; n < CANDIDATES && end > 0; n++, end = index->older[end]) {
        if (end <= best || index->tokens[end - 1 - best] != text[-1 - best]) continue;  // it cannot be longer
        int64_t length = 0;
        while (length < most && length < end && index->tokens[end - 1 - length] == text[-1 - length]) length++;
        if (length > best) {
            found = (Match){length, end};
            best = length;
            if (best == most) break;
        }
    }
    if (found.length || above) return found;
    end = index->singles[mixed((uint32_t)text[-1], index->shift)];
    if (end > 0 && index->tokens[end - 1] == text[-1]) found = (Match){1, end};
    return found;
}

// Copies at most `limit` tokens from position `end` on, up to a gap. Returns how many.
static int64_t copy_after(const Index *index, int64_t end, int64_t limit, int32_t *out) {
    int64_t length = 0;
    while (length < limit && end + length < index->length && index->tokens[end + length] != GAP) {
        out[length] = index->tokens[end + length];
        length++;
    }
    return length;
}

// ---- the drafts of a step ----

static int64_t bit_length(int64_t value) { return value ? 64 - __builtin_clzll((uint64_t)value) : 0; }

// The draft of a slot for the gate, and its estimated acceptance (`Drafter`). Returns its length.
static int64_t offer(const Drafts *d, int64_t slot, int32_t *out, double *chance) {
    const int32_t *draft = d->drafts + slot * d->most, predicted = d->predicted[slot];
    const int64_t length = d->lengths[slot];
    const double predictions = d->predictions[slot];
    double expected = (d->by_match[bit_length(d->matched[slot])] + d->acceptance[slot]) / 2;
    if (predicted >= 0 && length && draft[0] == predicted) {
        expected = predictions > expected ? predictions : expected;
    } else if (predicted >= 0) {
        double sum = 0, right = 1;
        for (int64_t n = 0; n < length; n++) sum += right *= expected;
        if (predictions >= sum) {
            out[0] = predicted;
            *chance = predictions;
            return 1;
        }
    }
    for (int64_t n = 0; n < length; n++) out[n] = draft[n];
    *chance = expected;
    return length;
}

// Drafts for `count` sequences: at most limits[i] tokens for the one in slots[i], after the longest match in its own index
// or, where one of at least `least` tokens is longer, in memories[i], which may be null.
// Writes offers [count][most], their lengths and estimated acceptances.
void ngrams_draft(const Drafts *d, int64_t count, const int64_t *slots, const int64_t *limits, Index *const *memories,
                  int64_t least, int32_t *offers, int32_t *offered, double *chances) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], limit = limits[i] < d->most ? limits[i] : d->most;
        const Index *own = d->index[slot], *from = own;
        const int32_t *text = own->tokens + own->length;
        Match match = longest(own, text, own->length, 0);
        if (memories[i]) {
            const int64_t above = match.length > least - 1 ? match.length : least - 1;
            const Match longer = longest(memories[i], text, own->length, above);
            if (longer.length) match = longer, from = memories[i];
        }
        d->matched[slot] = (int32_t)match.length;
        const int64_t length = match.length ? copy_after(from, match.end, limit, d->drafts + slot * d->most) : 0;
        d->lengths[slot] = (int32_t)length;
        offered[i] = (int32_t)offer(d, slot, offers + i * d->most, chances + i);
    }
}

// What steps drew: tokens [ends[i - 1], ends[i]) for the sequence in slots[i], and what the model predicts after them, or
// -1. Compares them with the drafts, whether verified or not, and adds them to the index. Returns 0 where one has no room.
int64_t ngrams_learn(const Drafts *d, int64_t count, const int64_t *slots, const int64_t *ends, const int32_t *tokens,
                     const int32_t *predicted) {
    int64_t begin = 0, whole = 1;
    for (int64_t i = 0; i < count; begin = ends[i++]) {
        const int64_t slot = slots[i], drawn = ends[i] - begin, length = d->lengths[slot];
        const int32_t *draft = d->drafts + slot * d->most;
        if (drawn && length) {
            const int64_t most = drawn < length ? drawn : length;
            int64_t right = 0;
            while (right < most && draft[right] == tokens[begin + right]) right++;
            const int64_t compared = right < most ? right + 1 : most;
            double keeps = 1;
            for (int64_t n = 0; n < compared; n++) keeps *= 1 - d->weight;
            d->acceptance[slot] += (1 - keeps) * ((double)right / (double)compared - d->acceptance[slot]);
        }
        if (drawn && d->predicted[slot] >= 0)
            d->predictions[slot] += d->weight * ((tokens[begin] == d->predicted[slot]) - d->predictions[slot]);
        d->lengths[slot] = 0;
        d->predicted[slot] = predicted[i];
        whole &= ngrams_extend(d->index[slot], tokens + begin, drawn);
    }
    return whole;
}

// How many drafts of each sequence are verified (`draft_lengths` of drafter.py). `cost` has seconds by rows, up to `widest`.
// `given` and `rights` [count] are room to work in. Returns the sum of lengths.
int64_t ngrams_gate(int64_t count, const double *acceptances, const int32_t *offered, int64_t decoding, const double *cost,
                    int64_t widest, double extra, double unlikely, double worth, int32_t *lengths, int32_t *given,
                    double *rights) {
    for (int64_t i = 0; i < count; i++) lengths[i] = given[i] = 0, rights[i] = acceptances[i];
    if (decoding >= widest) return 0;
    int64_t taken = 0;
    double tokens = (double)decoding, best = worth * tokens / (cost[decoding] + extra);
    for (int64_t n = 1; decoding + n <= widest; n++) {  // one row more, for the likeliest draft that is left
        int64_t next = -1;
        for (int64_t i = 0; i < count; i++)
            if (given[i] < offered[i] && rights[i] >= unlikely && (next < 0 || rights[i] > rights[next])) next = i;
        if (next < 0) break;
        given[next]++;
        tokens += rights[next];
        rights[next] *= acceptances[next];
        const double rate = tokens / (cost[decoding + n] + extra);
        if (rate > best) {
            best = rate, taken = n;
            for (int64_t i = 0; i < count; i++) lengths[i] = given[i];
        }
    }
    return taken;
}

#endif
