//! A bounded queue of jobs for worker threads. Each job wakes one thread: the one that became idle last, whose caches
//! are warm.

use std::{
    collections::VecDeque,
    thread::{self, Thread},
};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Semaphore;

pub struct JobQueue<J> {
    state: Mutex<State<J>>,
    capacity: Semaphore,
}

struct State<J> {
    jobs: VecDeque<J>,
    idle: Vec<Thread>,
    is_closed: bool,
}

impl<J> JobQueue<J> {
    pub fn new(limit: usize) -> Self {
        let state = State { jobs: VecDeque::with_capacity(limit), idle: Vec::new(), is_closed: false };
        Self { state: Mutex::new(state), capacity: Semaphore::new(limit) }
    }

    /// Waits for space.
    pub async fn push(&self, job: J) {
        // The semaphore is never closed, so this doesn't fail.
        if let Ok(permit) = self.capacity.acquire().await {
            permit.forget();
            self.enqueue(job);
        }
    }

    /// Returns the job if the queue is full.
    pub fn try_push(&self, job: J) -> Result<(), J> {
        match self.capacity.try_acquire() {
            Ok(permit) => {
                permit.forget();
                self.enqueue(job);
                Ok(())
            }
            Err(_) => Err(job),
        }
    }

    fn enqueue(&self, job: J) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        let thread = state.idle.pop();
        drop(state);
        if let Some(thread) = thread {
            thread.unpark();
        }
    }

    /// The next job, for a worker thread; `None` when the queue is closed and empty.
    pub fn take(&self) -> Option<J> {
        let current = thread::current();
        loop {
            let mut state = self.lock();
            // `park` may return without `unpark`, so this thread may still be listed.
            state.idle.retain(|t| t.id() != current.id());
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                self.capacity.add_permits(1);
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            state.idle.push(current.clone());
            drop(state);
            thread::park();
        }
    }

    /// Lets the workers end when the queue is empty.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.idle.drain(..).for_each(|t| t.unpark());
    }

    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn every_job_runs_once_and_workers_end_when_the_queue_is_closed() {
        let queue = Arc::new(JobQueue::new(2));
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let queue = queue.clone();
                thread::spawn(move || std::iter::from_fn(|| queue.take()).collect::<Vec<u32>>())
            })
            .collect();
        for job in 0..10_000 {
            queue.push(job).await;
        }
        queue.close();
        let mut done: Vec<u32> = workers.into_iter().flat_map(|w| w.join().unwrap()).collect();
        done.sort_unstable();
        assert!(done.into_iter().eq(0..10_000));
    }

    #[test]
    fn a_full_queue_returns_the_job() {
        let queue = JobQueue::new(1);
        assert_eq!(queue.try_push(1), Ok(()));
        assert_eq!(queue.try_push(2), Err(2));
        assert_eq!(queue.take(), Some(1));
        assert_eq!(queue.try_push(3), Ok(()));
    }
}
