//! Pipes through which the kernel moves data between two sockets. A connection holds one only while it is not empty.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use crate::limits::Gauge;

/// Size of the first pipes in bytes: as much as the kernel allows (`/proc/sys/fs/pipe-max-size`). The kernel counts a
/// page for each piece of a packet, so a pipe holds less than that. A pipe of 256 KiB costs twice as much CPU.
const LARGE: usize = 1024 * 1024;

/// Number of pipes of the process that are large. The kernel allows each user 64 MiB of pipes larger than one page
/// (`/proc/sys/fs/pipe-user-pages-soft`), beyond which it makes pipes of two pages.
const LARGE_ONES: usize = 32;

/// Size of further pipes in bytes.
const SMALL: usize = 64 * 1024;

/// Most empty pipes that a thread keeps.
const KEPT: usize = 16;

/// Most bytes to move in one call.
const MOST: usize = 1024 * 1024;

#[derive(Debug)]
pub(super) struct Pipe {
    output: OwnedFd,
    input: OwnedFd,
    /// Bytes in the pipe.
    pub(super) held: usize,
    _place: Place,
}

/// A pipe's place among those that the process may have.
#[derive(Debug)]
struct Place {
    all: Arc<Gauge>,
    /// Whether few pipes had one when it was taken.
    is_early: bool,
}

impl Place {
    /// Takes a place that is counted already.
    fn new(all: &Arc<Gauge>) -> Self {
        Self {
            all: all.clone(),
            is_early: all.get() <= LARGE_ONES,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.leave();
    }
}

impl Pipe {
    fn new(place: Place) -> io::Result<Self> {
        let (output, input) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let size = if place.is_early { LARGE } else { SMALL };
        // A smaller pipe works as well.
        let _ = fcntl_setpipe_size(&input, size);
        Ok(Self {
            output,
            input,
            held: 0,
            _place: place,
        })
    }

    /// Continues with a pipe of an earlier proxy.
    pub(super) fn inherited(
        [output, input]: [OwnedFd; 2],
        held: usize,
        places: &Arc<Gauge>,
    ) -> Self {
        places.force();
        Self {
            output,
            input,
            held,
            _place: Place::new(places),
        }
    }

    /// Returns the ends, and the number of bytes in the pipe.
    pub(super) fn into_parts(self) -> ([OwnedFd; 2], usize) {
        ([self.output, self.input], self.held)
    }

    /// Moves what a socket has into the pipe; returns the number of bytes, 0 at the end of the data.
    pub(super) fn fill(&mut self, from: &OwnedFd) -> rustix::io::Result<usize> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let moved = splice(from, None, &self.input, None, MOST, flags)?;
        self.held += moved;
        Ok(moved)
    }

    /// Moves data from the pipe to a socket; returns the number of bytes.
    pub(super) fn empty(&mut self, to: &OwnedFd) -> rustix::io::Result<usize> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let moved = splice(&self.output, None, to, None, self.held, flags)?;
        self.held -= moved;
        Ok(moved)
    }
}

/// The pipes of a thread that are empty now.
#[derive(Debug)]
pub(super) struct Pipes {
    empty: Vec<Pipe>,
    /// All pipes of the process, and how many there may be.
    pub(super) places: Arc<Gauge>,
    most: usize,
}

impl Pipes {
    pub(super) fn new(places: Arc<Gauge>, most: usize) -> Self {
        Self {
            empty: Vec::new(),
            places,
            most,
        }
    }

    /// Takes a pipe.
    pub(super) fn take(&mut self) -> io::Result<Pipe> {
        if let Some(pipe) = self.empty.pop() {
            return Ok(pipe);
        }
        if !self.places.enter(self.most) {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Pipe::new(Place::new(&self.places))
    }

    /// Takes a pipe back. One that is not empty is closed.
    pub(super) fn give(&mut self, pipe: Pipe) {
        if pipe.held == 0 && self.empty.len() < KEPT {
            self.empty.push(pipe);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::fcntl_getpipe_size;

    use super::*;

    #[test]
    fn the_first_pipes_are_large_and_pipes_are_bounded() {
        const MOST: usize = LARGE_ONES + 1;
        let mut pipes = Pipes::new(Arc::default(), MOST);
        let mut taken: Vec<_> = (0..MOST).map(|_| pipes.take().unwrap()).collect();
        let size = |pipe: &Pipe| fcntl_getpipe_size(&pipe.input).unwrap();
        assert_eq!(size(&taken[MOST - 1]), SMALL);
        assert!(size(&taken[0]) > SMALL);
        assert!(pipes.take().is_err());
        pipes.give(taken.swap_remove(0));
        assert!(
            size(&pipes.take().unwrap()) > SMALL,
            "an empty pipe is kept"
        );
    }
}
