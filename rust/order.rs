//! Batch orders with every writer before its readers.

use crate::error::{Error, Result};
use crate::step::same_length;

/// A batch order, and the swaps that lead to it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Order {
    /// `permutation[i]` is the present position of the request that goes to position i.
    pub permutation: Vec<usize>,
    /// The same as swaps of two positions, one after the other.
    pub swaps: Vec<(usize, usize)>,
    /// Present positions of the short requests that stand before the first long one now and behind a long one then,
    /// ascending.
    pub demoted: Vec<usize>,
}

/// Largest phase a request can have.
const LAST_PHASE: i8 = 2;

/// Finds batch orders; keeps its scratch from call to call.
#[derive(Debug, Default)]
pub struct Planner {
    /// (reader, writer), sorted.
    by_reader: Vec<(usize, usize)>,
    /// (writer, reader), sorted.
    by_writer: Vec<(usize, usize)>,
    /// Writers that a request still waits for.
    waits_for: Vec<usize>,
    /// Section of each request: its phase, cut in two where short requests keep the lead.
    section_of: Vec<i8>,
    /// Section of the request at each position in the order to be.
    sections: Vec<i8>,
    /// Request at each position, and position of each request.
    at: Vec<usize>,
    place: Vec<usize>,
    visited: Vec<usize>,
    stack: Vec<usize>,
}

impl Planner {
    /// Forget the dependencies of the last step.
    pub fn clear(&mut self) {
        self.by_reader.clear();
    }

    /// The request at position `reader` reads what the one at `writer` writes. Repetition does no harm.
    pub fn depend(&mut self, reader: usize, writer: usize) {
        if self.by_reader.last() != Some(&(reader, writer)) {
            self.by_reader.push((reader, writer));
        }
    }

    /// An order in which each writer stands before its readers and phases do not descend; None if there is none.
    ///
    /// Positions are filled from the front. A request that has what it needs stays where it is; one that still
    /// waits for a writer changes places with a writer that waits for nothing itself. One that is read in turn goes no
    /// further back than to the hindmost of its own writers. One that nobody reads can go behind all that others
    /// wait for as well: it then makes room for the hindmost writer with a reader in front of it, whoever that is. So
    /// a request moves only to get in front of its readers, to make room for one that does, or to reach its section,
    /// and an order that is right already comes back unchanged.
    ///
    /// With `short`, by request whether its query is short, a short request in front of the first long one stays in front
    /// of every long one, unless it needs what a long one writes, itself or through others. The requests that this demotes
    /// are demoted in every order there is.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::Phase`] for `phases` or `short` that do not fit.
    pub fn order(&mut self, num_reqs: usize, phases: Option<&[i8]>, short: Option<&[bool]>) -> Result<Option<Order>> {
        self.start(num_reqs, phases, short)?;
        let mut swaps = Vec::new();
        for position in 0..num_reqs {
            let section = self.sections[position];
            let here = self.at[position];
            let chosen = if self.section_of[here] != section {
                self.earliest_of_section(position, section)
            } else if self.waits_for[here] == 0 {
                Some(here)
            } else {
                self.hindmost_free_writer(here).filter(|&writer| self.section_of[writer] == section).map(|own| {
                    let is_read = !pairs_of(&self.by_writer, here).is_empty();
                    if is_read { own } else { self.hindmost_late_writer(own, section) }
                })
            };
            let Some(chosen) = chosen else {
                return Ok(None);
            };
            if chosen != here {
                let from = self.place[chosen];
                swaps.push((position, from));
                self.at.swap(position, from);
                self.place[here] = from;
                self.place[chosen] = position;
            }
            for &(_, reader) in pairs_of(&self.by_writer, chosen) {
                self.waits_for[reader] -= 1;
            }
        }
        let demoted = short.map_or_else(Vec::new, |short| self.demoted(short));
        Ok(Some(Order { permutation: self.at.clone(), swaps, demoted }))
    }

    fn start(&mut self, num_reqs: usize, phases: Option<&[i8]>, short: Option<&[bool]>) -> Result<()> {
        self.by_reader.sort_unstable();
        self.by_reader.dedup();
        self.by_writer.clear();
        self.by_writer.extend(self.by_reader.iter().map(|&(reader, writer)| (writer, reader)));
        self.by_writer.sort_unstable();
        self.waits_for.clear();
        self.waits_for.resize(num_reqs, 0);
        for &(reader, _) in &self.by_reader {
            self.waits_for[reader] += 1;
        }
        self.section_of.clear();
        match phases {
            None => self.section_of.resize(num_reqs, 0),
            Some(phases) => {
                same_length("phases", phases.len(), num_reqs)?;
                for (request, &phase) in phases.iter().enumerate() {
                    if !(0..=LAST_PHASE).contains(&phase) {
                        return Err(Error::Phase { request, phase });
                    }
                    self.section_of.push(2 * phase);
                }
            }
        }
        if let Some(short) = short {
            same_length("short", short.len(), num_reqs)?;
            self.keep_the_lead(short);
        }
        self.sections.clear();
        self.sections.extend_from_slice(&self.section_of);
        self.sections.sort_unstable();
        self.at.clear();
        self.at.extend(0..num_reqs);
        self.place.clear();
        self.place.extend(0..num_reqs);
        self.visited.clear();
        self.visited.resize(num_reqs, usize::MAX);
        Ok(())
    }

    /// Cut the first section with a long request in two: in front the short requests that keep the lead, with the
    /// writers they need, then all others. Behind that section every request stands behind a long one, whatever is done.
    fn keep_the_lead(&mut self, short: &[bool]) {
        let long = |&request: &usize| !short[request];
        let (Some(first_long), Some(section)) =
            ((0..short.len()).find(long), (0..short.len()).filter(long).map(|request| self.section_of[request]).min())
        else {
            return;
        };
        let mut follows: Vec<_> = short.iter().map(|short| !short).collect();
        spread(&self.by_writer, &mut follows);
        let mut leads: Vec<_> = (0..short.len())
            .map(|request| request < first_long && self.section_of[request] == section && !follows[request])
            .collect();
        spread(&self.by_reader, &mut leads);
        for (own, leads) in self.section_of.iter_mut().zip(leads) {
            *own += i8::from(*own == section && !leads);
        }
    }

    /// The requests that stood before the first long one and do no longer.
    fn demoted(&self, short: &[bool]) -> Vec<usize> {
        let is_short = |request: &usize| short[*request];
        let first_long = self.at.iter().copied().take_while(is_short).count();
        (0..short.len()).take_while(is_short).filter(|&request| self.place[request] >= first_long).collect()
    }

    /// Of the requests not yet placed that belong to `section` and wait for nothing: the first that stands where
    /// the request at `position` belongs, so that one swap serves both; else the first at all.
    fn earliest_of_section(&self, position: usize, section: i8) -> Option<usize> {
        let home = self.section_of[self.at[position]];
        let candidates = || {
            (position + 1..self.at.len()).filter(|&from| {
                let request = self.at[from];
                self.section_of[request] == section && self.waits_for[request] == 0
            })
        };
        let from = candidates().find(|&from| self.sections[from] == home).or_else(|| candidates().next())?;
        Some(self.at[from])
    }

    /// Of the writers that a request waits for, directly or through others, and that wait for nothing
    /// themselves: the one that stands hindmost. None where they wait for each other.
    fn hindmost_free_writer(&mut self, reader: usize) -> Option<usize> {
        let mut best = None;
        // The position being filled marks this search: the reader itself can be searched from more than once.
        let position = self.place[reader];
        self.stack.clear();
        self.stack.push(reader);
        while let Some(request) = self.stack.pop() {
            for &(_, writer) in pairs_of(&self.by_reader, request) {
                // A writer in front of the reader is placed already.
                if self.place[writer] <= position || self.visited[writer] == position {
                    continue;
                }
                self.visited[writer] = position;
                if self.waits_for[writer] == 0 {
                    best = best.max(Some(self.place[writer]));
                } else {
                    self.stack.push(writer);
                }
            }
        }
        best.map(|place| self.at[place])
    }

    /// Of the writers that stand behind a reader of theirs and wait for nothing: the one that stands hindmost, but in
    /// its section and behind `own`; else `own`.
    fn hindmost_late_writer(&self, own: usize, section: i8) -> usize {
        let mut best = own;
        for &(writer, reader) in &self.by_writer {
            let place = self.place[writer];
            if place > self.place[best]
                && place > self.place[reader]
                && self.waits_for[writer] == 0
                && self.section_of[writer] == section
                && self.sections[place] == section
            {
                best = writer;
            }
        }
        best
    }
}

/// Mark what is reached from the marked ones along the pairs, which are sorted.
fn spread(pairs: &[(usize, usize)], marked: &mut [bool]) {
    let mut from: Vec<_> = (0..marked.len()).filter(|&request| marked[request]).collect();
    while let Some(request) = from.pop() {
        for &(_, next) in pairs_of(pairs, request) {
            if !std::mem::replace(&mut marked[next], true) {
                from.push(next);
            }
        }
    }
}

/// The pairs that begin with `first`, in a sorted list.
fn pairs_of(sorted: &[(usize, usize)], first: usize) -> &[(usize, usize)] {
    let start = sorted.partition_point(|pair| pair.0 < first);
    let count = sorted[start..].partition_point(|pair| pair.0 == first);
    &sorted[start..start + count]
}
